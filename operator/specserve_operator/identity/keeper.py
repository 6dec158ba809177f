"""Keeps the authority in a store and in step with time.

The store is written first and the new state used after: whoever reads the store after a crash trusts at least what was
trusted before it. Two operators that overlap for a moment write one after the other; the later one goes on with what
the first has written.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from specserve_operator.identity.authority import (
    Authority,
    AuthorityPolicy,
    AuthorityState,
    AuthorityStateError,
    advance,
    dump_state,
    load_state,
    postpone,
)

_LOG = logging.getLogger(__name__)

CHECK_SECONDS: Final = 30.0
_TRIES: Final = 5


class CaStoreError(Exception):
    """The store could not be read or written. The message says what to do."""


class CaConflictError(CaStoreError):
    """Somebody else has written since the version that was given."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store holds: None or empty `data` before the first save. `version` is for the next save."""

    data: bytes | None
    version: str


class CaStore(Protocol):
    """Where the state is kept: in a cluster, one key of a Secret in the operator's own namespace."""

    async def load(self) -> Stored:
        """Raises `CaStoreError`, also where the place itself is missing and may not be made."""
        ...

    async def save(self, data: bytes, *, version: str) -> str:
        """Replaces what `version` was; returns the new version. Raises `CaConflictError`, `CaStoreError`."""
        ...


class AuthorityKeeper:
    """The authority of now. `on_change` is called whenever the trust bundle is another one."""

    def __init__(
        self,
        store: CaStore,
        policy: AuthorityPolicy,
        *,
        now: Callable[[], datetime],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._policy = policy
        self._now = now
        self._on_change = on_change
        self._version = ""
        self._state: AuthorityState | None = None
        self._authority: Authority | None = None

    @property
    def authority(self) -> Authority:
        """Raises RuntimeError before `start`."""
        if self._authority is None:
            raise RuntimeError("AuthorityKeeper.start() has not been awaited")
        return self._authority

    async def start(self) -> None:
        """Loads the state, or makes the first one. Raises `CaStoreError`, `AuthorityStateError`."""
        await self._load()
        await self._bring_to(self._after_absence)

    async def step(self) -> None:
        """Follows what somebody else has stored, and does what is due.

        Raises `CaStoreError`, `AuthorityStateError`; then the authority of before goes on.
        """
        await self._load()
        await self._bring_to(lambda state: advance(state, self._now(), self._policy))

    def _after_absence(self, state: AuthorityState | None) -> AuthorityState:
        now = self._now()
        return advance(state and postpone(state, now, self._policy), now, self._policy)

    async def _bring_to(self, change: Callable[[AuthorityState | None], AuthorityState]) -> None:
        for _ in range(_TRIES):
            state = change(self._state)
            if state is self._state:
                return
            try:
                self._version = await self._store.save(dump_state(state), version=self._version)
            except CaConflictError:
                await self._load()
                continue
            _LOG.info("certificate authority: %s", _describe(self._state, state))
            self._use(state)
            return
        raise CaStoreError("the certificate authority is written by somebody else all the time; is there a second one?")

    async def run(self, stop: asyncio.Event) -> None:
        """Steps until `stop` is set. A store that fails is asked again: what is in memory serves for months."""
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), CHECK_SECONDS)
                return
            try:
                await self.step()
            except (CaStoreError, AuthorityStateError) as error:
                _LOG.warning("certificate authority: %s; trying again", error)

    async def _load(self) -> None:
        stored = await self._store.load()
        if stored.version == self._version:
            return
        if stored.data:
            state = load_state(stored.data)
            if state != self._state:
                if self._state is not None:
                    _LOG.info("certificate authority: somebody else has stored another one, which is used from now on")
                self._use(state)
        elif self._state is not None:
            # Somebody has emptied it. Pods trust what they have, so just that is written again.
            _LOG.warning("certificate authority: the stored state is gone and is written again")
            stored = Stored(None, await self._store.save(dump_state(self._state), version=stored.version))
        # Not before: what could not be used is no state to go on from.
        self._version = stored.version

    def _use(self, state: AuthorityState) -> None:
        authority = Authority(state, self._policy)
        is_changed = self._authority is None or self._authority.trust_bundle != authority.trust_bundle
        self._state, self._authority = state, authority
        if is_changed:
            self._on_change()


def _describe(before: AuthorityState | None, after: AuthorityState) -> str:
    if before is None:
        return "made"
    if before.current != after.current:
        is_successor = before.successor is not None and before.successor.ca == after.current
        return "its successor signs from now on" if is_successor else "expired, made anew"
    if before.successor != after.successor:
        return "a successor is trusted"
    return f"{len(after.trusted_pems)} trusted"
