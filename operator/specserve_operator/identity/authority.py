"""The certificate authorities of an installation: which one signs, which are trusted, and how they follow each other.

    (none) ──► signs ──age──► next is trusted too ──propagation──► next signs ──longest lifetime──► old is forgotten

A new authority signs nothing before everybody has had time to trust it, and an old one is trusted until the last
certificate that it can have signed is over. All of that follows from a state and the time; nothing here keeps a clock.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from cryptography import x509

from specserve_operator.identity import certificates
from specserve_operator.identity.certificates import KeyPair, PublicKey, Subject

FORMAT: Final = 1

NewCa = Callable[[datetime, timedelta], KeyPair]


class AuthorityStateError(ValueError):
    """A stored state that cannot be used. The message says what is wrong with it."""


class PolicyError(ValueError):
    """Times that do not fit together. The message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityPolicy:
    """How long what lives.

    Attributes:
        certificate_lifetime: of pods' certificates, which they renew after half of it; a second to a week.
        ca_lifetime: of an authority.
        rotate_after: age at which an authority gets a successor.
        propagation: for how long a successor is trusted before it signs. Pods learn of it from their ConfigMap within
            minutes, and with every certificate: at this length all of them have renewed theirs at least once.

    Raises PolicyError.
    """

    certificate_lifetime: timedelta = timedelta(hours=24)
    ca_lifetime: timedelta = timedelta(days=365)
    rotate_after: timedelta = timedelta(days=180)
    propagation: timedelta = timedelta(hours=24)

    def __post_init__(self) -> None:
        if not timedelta(seconds=1) <= self.certificate_lifetime <= timedelta(days=7):
            raise PolicyError(f"certificate_lifetime {self.certificate_lifetime}: must be in 1 s to 7 days")
        if not timedelta(0) <= self.propagation or not timedelta(0) < self.rotate_after:
            raise PolicyError("propagation and rotate_after must not be negative")
        if self.rotate_after + self.propagation + self.certificate_lifetime > self.ca_lifetime:
            raise PolicyError(
                f"ca_lifetime {self.ca_lifetime}: must hold rotate_after, propagation and certificate_lifetime"
            )


@dataclass(frozen=True, slots=True)
class Successor:
    """An authority that is trusted and does not sign before `signs_from`."""

    ca: KeyPair
    signs_from: datetime


@dataclass(frozen=True, slots=True)
class Retired:
    """An authority that signs no more: its key is gone."""

    certificate_pem: str
    trusted_until: datetime


@dataclass(frozen=True, slots=True)
class AuthorityState:
    """All there is to keep. `longest_lifetime`: of any certificate that `current` may have signed."""

    current: KeyPair
    since: datetime
    longest_lifetime: timedelta
    successor: Successor | None = None
    retired: tuple[Retired, ...] = ()

    @property
    def trusted_pems(self) -> tuple[str, ...]:
        """Certificates of all authorities that are to be trusted."""
        successor = () if self.successor is None else (self.successor.ca.certificate_pem,)
        return (self.current.certificate_pem, *successor, *(old.certificate_pem for old in self.retired))


def advance(
    state: AuthorityState | None, now: datetime, policy: AuthorityPolicy, *, new_ca: NewCa = certificates.new_ca
) -> AuthorityState:
    """The state that `state` has become by `now`; `state` itself where nothing is due.

    Must be called, and the result stored, before anything is signed at `now`.
    """
    if state is None or now >= _expiry(state.current.certificate_pem):
        # Also after an absence of months. Certificates of pods have ended with their authority, if not before.
        return AuthorityState(new_ca(now, policy.ca_lifetime), now, policy.certificate_lifetime)
    if state.longest_lifetime < policy.certificate_lifetime:
        state = replace(state, longest_lifetime=policy.certificate_lifetime)
    if state.successor is not None and now >= state.successor.signs_from:
        old = Retired(state.current.certificate_pem, now + state.longest_lifetime)
        state = AuthorityState(
            current=state.successor.ca,
            since=now,
            longest_lifetime=policy.certificate_lifetime,
            retired=(*state.retired, old),
        )
    if state.successor is None and now >= state.since + policy.rotate_after:
        successor = Successor(new_ca(now, policy.ca_lifetime), now + policy.propagation)
        state = replace(state, successor=successor)
    kept = tuple(old for old in state.retired if now < old.trusted_until)
    return state if kept == state.retired else replace(state, retired=kept)


def postpone(state: AuthorityState, now: datetime, policy: AuthorityPolicy) -> AuthorityState:
    """The state for a control plane that starts now: nobody may have told the pods of the successor while it was away.

    Not where the current authority would come to its end meanwhile.
    """
    if state.successor is None:
        return state
    signs_from = now + policy.propagation
    if signs_from <= state.successor.signs_from or signs_from >= _expiry(state.current.certificate_pem):
        return state
    return replace(state, successor=replace(state.successor, signs_from=signs_from))


def dump_state(state: AuthorityState) -> bytes:
    """The state as JSON. It holds private keys."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "current": asdict(state.current),
        "since": state.since.isoformat(),
        "longestLifetimeSeconds": state.longest_lifetime.total_seconds(),
        "retired": [
            {"certificate_pem": old.certificate_pem, "trusted_until": old.trusted_until.isoformat()}
            for old in state.retired
        ],
    }
    if state.successor is not None:
        document["successor"] = asdict(state.successor.ca) | {"signs_from": state.successor.signs_from.isoformat()}
    return json.dumps(document, sort_keys=True, indent=1).encode()


def load_state(data: bytes) -> AuthorityState:
    """What `dump_state` made. Raises `AuthorityStateError`, and never quotes what it read."""
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise AuthorityStateError(f"format {document['format']!r}, where this version knows {FORMAT}")
        successor = document.get("successor")
        return AuthorityState(
            current=_load_ca(document["current"]),
            since=_load_time(document["since"]),
            longest_lifetime=timedelta(seconds=document["longestLifetimeSeconds"]),
            successor=successor and Successor(_load_ca(successor), _load_time(successor["signs_from"])),
            retired=tuple(_load_retired(old) for old in document["retired"]),
        )
    except AuthorityStateError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, x509.InvalidVersion):
        # Without the cause: its text may hold a part of a private key.
        raise AuthorityStateError("not a state that this version has written") from None


def _load_ca(fields: Any) -> KeyPair:
    pair = KeyPair(fields["certificate_pem"], fields["key_pem"])
    certificate = certificates.read_certificate(pair.certificate_pem)
    if not certificates.is_pair(certificate, certificates.read_key(pair.key_pem)):
        raise AuthorityStateError("a private key is not that of its certificate")
    return pair


def _load_retired(fields: Any) -> Retired:
    certificates.read_certificate(fields["certificate_pem"])
    return Retired(fields["certificate_pem"], _load_time(fields["trusted_until"]))


def _load_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise AuthorityStateError("a time without its zone")
    return time


def _expiry(pem: str) -> datetime:
    return certificates.read_certificate(pem).not_valid_after_utc


class Authority:
    """Signs by one state. Immutable: another state is another authority."""

    def __init__(self, state: AuthorityState, policy: AuthorityPolicy) -> None:
        self._policy = policy
        self._ca: x509.Certificate = certificates.read_certificate(state.current.certificate_pem)
        self._key = certificates.read_key(state.current.key_pem)
        # In one order, so that what is the same reads the same.
        self.trust_bundle = "".join(sorted(state.trusted_pems))

    def certify(self, public_key: PublicKey, subject: Subject, now: datetime) -> x509.Certificate:
        """A certificate for `subject`, valid from now on."""
        return certificates.issue(
            public_key,
            subject,
            ca=self._ca,
            ca_key=self._key,
            now=now,
            lifetime=self._policy.certificate_lifetime,
        )
