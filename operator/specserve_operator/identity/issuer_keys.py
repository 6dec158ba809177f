"""The keys with which the cluster signs ServiceAccount tokens, as its API server publishes them.

They are read again once in a while, and for a token that names a key which is not among them: but not often, whoever
sends such tokens. While the API server does not answer, those of before serve.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import jwt

_LOG = logging.getLogger(__name__)

# Paths at the API server, readable by every ServiceAccount (`system:service-account-issuer-discovery`).
CONFIGURATION_PATH: Final = "/.well-known/openid-configuration"
KEYS_PATH: Final = "/openid/v1/jwks"

REFRESH_SECONDS: Final = 3600.0
# Between two reads for the sake of unknown keys.
UNKNOWN_KEY_SECONDS: Final = 10.0

ALGORITHMS: Final = ("RS256", "ES256", "ES384", "ES512")


class KeysUnavailableError(Exception):
    """The keys could not be read. The message says why."""


class KeySource(Protocol):
    """Reads JSON documents of the API server."""

    async def get(self, path: str) -> Any:
        """The document at `path`, decoded. Raises `KeysUnavailableError`."""
        ...


@dataclass(frozen=True, slots=True)
class IssuerKeySet:
    """Who signs, and the public keys by their id."""

    issuer: str
    keys: Mapping[str, jwt.PyJWK]


def read_key_set(configuration: Any, key_set: Any) -> IssuerKeySet:
    """Both documents of OpenID discovery. Keys of a kind that no token may be signed with are left out.

    Raises `KeysUnavailableError` for what are no such documents.
    """
    try:
        issuer, entries = configuration["issuer"], list(key_set["keys"])
        if not isinstance(issuer, str) or not issuer:
            raise KeysUnavailableError(f"{CONFIGURATION_PATH}: the issuer is missing")
        keys = {}
        for entry in entries:
            if not isinstance(entry.get("kid"), str) or entry.get("alg", ALGORITHMS[0]) not in ALGORITHMS:
                continue
            try:
                key = jwt.PyJWK(entry)
            except (jwt.PyJWTError, ValueError, TypeError) as error:
                _LOG.warning("%s: key %s is left out: %s", KEYS_PATH, entry["kid"], error)
                continue
            if key.algorithm_name in ALGORITHMS:
                keys[entry["kid"]] = key
    except (TypeError, KeyError, AttributeError) as error:
        raise KeysUnavailableError(f"{KEYS_PATH}: not a set of keys") from error
    return IssuerKeySet(issuer, keys)


@dataclass(slots=True)
class IssuerKeys:
    """The keys of now. `clock` in seconds, never backwards."""

    source: KeySource
    clock: Callable[[], float]
    _known: IssuerKeySet | None = None
    _tried_at: float = float("-inf")
    _read_at: float = float("-inf")
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def find(self, key_id: str) -> tuple[str, jwt.PyJWK] | None:
        """The issuer and its key of that id; None if it has no such key. Raises `KeysUnavailableError`."""
        if not self._has(key_id):
            async with self._reading:
                if not self._has(key_id) and self.clock() - self._tried_at >= UNKNOWN_KEY_SECONDS:
                    await self._read()
        if self._known is None:
            raise KeysUnavailableError("the keys of ServiceAccount tokens have not been read yet")
        key = self._known.keys.get(key_id)
        return None if key is None else (self._known.issuer, key)

    def _has(self, key_id: str) -> bool:
        is_fresh = self.clock() - self._read_at < REFRESH_SECONDS
        return is_fresh and self._known is not None and key_id in self._known.keys

    async def _read(self) -> None:
        self._tried_at = self.clock()
        try:
            documents = [await self.source.get(path) for path in (CONFIGURATION_PATH, KEYS_PATH)]
            self._known = read_key_set(*documents)
        except KeysUnavailableError as error:
            if self._known is None:
                raise
            _LOG.warning("keys of ServiceAccount tokens: %s; those of before serve", error)
            return
        self._read_at = self.clock()
