"""Rotation of the certificate authority: whatever the operator goes through, what it signs is trusted."""

import json
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.verification import ClientVerifier, PolicyBuilder, Store
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.identity.authority import (
    Authority,
    AuthorityPolicy,
    AuthorityState,
    AuthorityStateError,
    PolicyError,
    advance,
    dump_state,
    load_state,
    postpone,
)
from specserve_operator.identity.certificates import Subject, new_key, read_certificate
from tests.unit.identity.builders import START

HOUR = timedelta(hours=1)
# A day for a year: rotation within hours.
POLICY = AuthorityPolicy(
    certificate_lifetime=2 * HOUR, ca_lifetime=24 * HOUR, rotate_after=8 * HOUR, propagation=3 * HOUR
)


def bundle_of(state: AuthorityState) -> set[str]:
    return set(state.trusted_pems)


def step_through(*hours: float, policy: AuthorityPolicy = POLICY) -> list[AuthorityState]:
    """The states of an operator that looks at these times after the start."""
    state, states = None, []
    for hour in hours:
        state = advance(state, START + hour * HOUR, policy)
        states.append(state)
    return states


def test_the_first_authority_signs_at_once_and_nothing_changes_until_it_is_of_age() -> None:
    first, later = step_through(0, 7.9)
    assert later is first
    assert bundle_of(first) == {first.current.certificate_pem}


def test_a_successor_is_trusted_for_the_time_of_propagation_before_it_signs() -> None:
    first, at_age, waiting, signing = step_through(0, 8, 10.9, 11)
    assert at_age.successor is not None
    assert at_age.current == waiting.current == first.current
    assert bundle_of(at_age) == {first.current.certificate_pem, at_age.successor.ca.certificate_pem}
    assert signing.current == at_age.successor.ca
    assert bundle_of(signing) == bundle_of(at_age)


def test_an_old_authority_is_trusted_until_its_last_certificate_is_over_and_its_key_is_gone_at_once() -> None:
    first, _, signing, before, after = step_through(0, 8, 11, 12.9, 13)
    assert first.current.key_pem.encode() not in dump_state(signing)
    assert first.current.certificate_pem in bundle_of(before)
    assert bundle_of(after) == {signing.current.certificate_pem}


def test_an_authority_that_expired_while_nobody_looked_is_made_anew() -> None:
    first, after = step_through(0, 30)
    assert bundle_of(after).isdisjoint(bundle_of(first))
    assert after.successor is None


def test_a_successor_that_nobody_could_tell_of_waits_anew_after_an_absence() -> None:
    _, at_age = step_through(0, 8)
    back = START + 12 * HOUR
    after = advance(postpone(at_age, back, POLICY), back, POLICY)
    assert after.current == at_age.current
    assert after.successor is not None
    assert after.successor.signs_from == back + POLICY.propagation


def test_it_does_not_wait_beyond_the_end_of_the_authority_before_it() -> None:
    _, at_age = step_through(0, 8)
    assert postpone(at_age, START + 22 * HOUR, POLICY) is at_age


def test_a_shorter_lifetime_does_not_cut_the_trust_in_longer_certificates() -> None:
    state = advance(None, START, POLICY)
    shorter = replace(POLICY, certificate_lifetime=timedelta(minutes=1))
    for hour in (8, 11):
        state = advance(state, START + hour * HOUR, shorter)
    assert state.retired[0].trusted_until == START + 11 * HOUR + POLICY.certificate_lifetime


@dataclass
class World:
    """An operator that steps, stops and starts, and certificates that must be trusted until they end."""

    policy: AuthorityPolicy = POLICY
    now: datetime = START
    state: AuthorityState | None = None
    up_since: datetime = START
    # When each authority was first trusted, in this operator's uninterrupted life.
    trusted_since: dict[str, datetime] = field(default_factory=dict)
    # By issuer, until when certificates of it are around.
    until: dict[str, datetime] = field(default_factory=dict)

    def look(self) -> None:
        before = self.state
        self.state = advance(self.state, self.now, self.policy)
        assert advance(self.state, self.now, self.policy) is self.state, "a second look finds nothing to do"
        assert load_state(dump_state(self.state)) == self.state
        for pem in self.state.trusted_pems:
            self.trusted_since.setdefault(pem, self.now)
        is_fresh_start = (
            before is None or self.now >= read_certificate(before.current.certificate_pem).not_valid_after_utc
        )
        if is_fresh_start:
            # Nothing that was trusted is left to be mistaken about.
            self.trusted_since[self.state.current.certificate_pem] = datetime.min.replace(tzinfo=START.tzinfo)
        self._check()

    def restart(self) -> None:
        if self.state is not None:
            signing = self.state.current.certificate_pem
            self.trusted_since = {signing: self.trusted_since[signing]} | {
                old.certificate_pem: self.trusted_since[old.certificate_pem] for old in self.state.retired
            }
            expiry = read_certificate(signing).not_valid_after_utc
            if self.state.successor is not None and self.now + self.policy.propagation >= expiry:
                # There is no time left to wait anew: signing before all know is better than not at all.
                successor = self.state.successor
                self.trusted_since[successor.ca.certificate_pem] = successor.signs_from - self.policy.propagation
            self.state = postpone(self.state, self.now, self.policy)
        self.look()

    def certify(self) -> None:
        self.look()
        assert self.state is not None
        issuer = self.state.current.certificate_pem
        assert self.now >= self.trusted_since[issuer] + self.policy.propagation, "signed before it could be trusted"
        end = min(self.now + self.policy.certificate_lifetime, read_certificate(issuer).not_valid_after_utc)
        self.until[issuer] = max(end, self.until.get(issuer, end))

    def _check(self) -> None:
        assert self.state is not None
        lost = {pem for pem, end in self.until.items() if end > self.now} - bundle_of(self.state)
        assert not lost, "certificates that nobody trusts any more"
        assert len(self.state.trusted_pems) <= 3


@settings(max_examples=120)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.25, 0.5, 0.75, 1.0, 2.0, 4.0, 30.0]),
            st.sampled_from(["look", "certify", "certify", "restart"]),
        ),
        min_size=15,
        max_size=50,
    )
)
def test_whatever_is_signed_is_trusted_from_before_its_begin_until_after_its_end(
    story: list[tuple[float, str]],
) -> None:
    world = World()
    world.look()
    for hours, what in story:
        world.now += timedelta(hours=hours)
        getattr(world, what)()


def test_what_an_authority_signs_stands_up_to_a_strict_verifier() -> None:
    state = advance(None, START, POLICY)
    authority = Authority(state, POLICY)
    subject = Subject(uri="spiffe://specserve.dev/ns/a/service/b/pool/c/pod/d", hosts=("d.pod.specserve.internal",))
    leaf = authority.certify(new_key().public_key(), subject, START)
    store = Store([read_certificate(state.current.certificate_pem)])
    client: ClientVerifier = PolicyBuilder().store(store).time(START).build_client_verifier()
    names = client.verify(leaf, []).subjects
    assert names is not None
    assert [name.value for name in names] == [subject.uri, *subject.hosts]
    PolicyBuilder().store(store).time(START).build_server_verifier(x509.DNSName(subject.hosts[0])).verify(leaf, [])
    assert leaf.not_valid_after_utc == START + POLICY.certificate_lifetime
    assert leaf.not_valid_before_utc < START
    stranger = read_certificate(advance(None, START, POLICY).current.certificate_pem)
    with pytest.raises((InvalidSignature, ValueError)):
        leaf.verify_directly_issued_by(stranger)


def test_no_certificate_outlives_its_authority() -> None:
    authority = Authority(advance(None, START, POLICY), POLICY)
    late = START + 23 * HOUR
    leaf = authority.certify(new_key().public_key(), Subject(uri="spiffe://specserve.dev/operator"), late)
    assert leaf.not_valid_after_utc == START + POLICY.ca_lifetime


def test_two_authorities_differ_by_name() -> None:
    names = {read_certificate(advance(None, START, POLICY).current.certificate_pem).subject for _ in range(3)}
    assert len(names) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"certificate_lifetime": timedelta(0)},
        {"certificate_lifetime": timedelta(days=8)},
        {"propagation": timedelta(seconds=-1)},
        {"rotate_after": timedelta(0)},
        {"ca_lifetime": timedelta(days=180)},
    ],
)
def test_times_that_do_not_fit_are_refused(change: dict[str, timedelta]) -> None:
    with pytest.raises(PolicyError):
        replace(AuthorityPolicy(), **change)


def _damaged(**changes: object) -> bytes:
    document = json.loads(dump_state(advance(None, START, POLICY)))
    return json.dumps(document | changes).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        _damaged(format=2),
        _damaged(current={"certificate_pem": "x", "key_pem": "y"}),
        _damaged(current=None),
        _damaged(since="yesterday"),
        _damaged(since="2030-01-01T00:00:00"),
        _damaged(longestLifetimeSeconds="x"),
        _damaged(retired=[{"certificate_pem": "x", "trusted_until": "2030-01-01T00:00:00+00:00"}]),
        _damaged(successor={"certificate_pem": "x"}),
    ],
)
def test_a_damaged_state_is_refused(data: bytes) -> None:
    with pytest.raises(AuthorityStateError):
        load_state(data)


def test_a_key_that_is_not_its_certificates_is_refused_without_being_shown() -> None:
    document = json.loads(dump_state(advance(None, START, POLICY)))
    other = advance(None, START, POLICY).current
    document["current"]["key_pem"] = other.key_pem
    with pytest.raises(AuthorityStateError) as caught:
        load_state(json.dumps(document).encode())
    assert other.key_pem[30:60] not in str(caught.value)
    assert caught.value.__cause__ is None
