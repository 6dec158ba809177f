"""A queue of keys to work on, with the semantics of client-go's work queue.

A key is in at most one of two places: waiting in line, or in the hands of a worker. Adding a key that
waits changes nothing; adding one that a worker holds puts it back in line when the worker is done. So one key
is never worked on twice at once, and nothing added is lost: every `add` is followed by a later `get`.

All methods but `get` are synchronous and meant for one event loop: that none of them awaits makes each of
them atomic.
"""

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from specserve_operator.runtime.clock import Clock, TimerHandle

K = TypeVar("K", bound=Hashable)


class QueueShutDown(Exception):  # noqa: N818 - a signal, as asyncio.QueueShutDown
    """The queue gives out no more keys."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay before the n-th retry of a key in a row: `base * 2**(n-1)`, at most `max`."""

    base_seconds: float = 0.1
    max_seconds: float = 60.0

    def delay_seconds(self, failures: int) -> float:
        """The delay after `failures` >= 1 failures in a row."""
        # The exponent is bounded: 2.0**1024 overflows, and no delay doubles that often.
        doublings: int = min(failures - 1, 64)
        return min(self.base_seconds * 2.0**doublings, self.max_seconds)


@dataclass(frozen=True, slots=True)
class _Delayed:
    due: float
    timer: TimerHandle


class WorkQueue(Generic[K]):
    """Keys to work on, each once at a time. Workers call `get`, then always `done`."""

    def __init__(self, clock: Clock, *, backoff: Backoff | None = None) -> None:
        self._clock = clock
        self._backoff = backoff or Backoff()
        self._line: deque[K] = deque()
        self._dirty: set[K] = set()  # must be worked on: in line, or in line again once `done`
        self._held_since: dict[K, float] = {}  # in the hands of a worker
        self._delayed: dict[K, _Delayed] = {}
        self._failures: dict[K, int] = {}
        self._added_at: dict[K, float] = {}
        self._getters: deque[asyncio.Future[None]] = deque()
        self._shut_down = False

    def __len__(self) -> int:
        """Keys in line, without those that a worker holds or that wait for their time."""
        return len(self._line)

    def oldest_age_seconds(self) -> float:
        """How long the key that has waited longest has been due; 0 when nothing waits."""
        return self._clock.time() - min(self._added_at.values()) if self._added_at else 0.0

    def longest_held_seconds(self) -> float:
        """For how long a worker has been at the key that it has had longest; 0 when none works."""
        return self._clock.time() - min(self._held_since.values()) if self._held_since else 0.0

    def add(self, key: K) -> None:
        """Has `key` worked on as soon as a worker is free, and not while another one holds it."""
        if self._shut_down or key in self._dirty:
            return
        self._dirty.add(key)
        self._added_at[key] = self._clock.time()
        if key not in self._held_since:
            self._line.append(key)
            self._wake_one()

    def add_after(self, key: K, delay_seconds: float) -> None:
        """Adds `key` after a delay. Of several delays for one key the earliest counts."""
        if self._shut_down:
            return
        if delay_seconds <= 0:
            self.add(key)
            return
        due = self._clock.time() + delay_seconds
        waiting = self._delayed.get(key)
        if waiting is not None:
            if waiting.due <= due:
                return
            waiting.timer.cancel()
        self._delayed[key] = _Delayed(due, self._clock.call_later(delay_seconds, lambda: self._mature(key)))

    def add_rate_limited(self, key: K) -> float:
        """Adds `key` after its back-off, which doubles until `forget`. Returns the delay in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay_seconds = self._backoff.delay_seconds(self._failures[key])
        self.add_after(key, delay_seconds)
        return delay_seconds

    def forget(self, key: K) -> None:
        """Ends the back-off of `key`: its next failure counts as the first."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The next key; the caller holds it until it calls `done`. Raises `QueueShutDown` at the end."""
        while not self._line:
            if self._shut_down:
                raise QueueShutDown
            getter = asyncio.get_running_loop().create_future()
            self._getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                # Woken and cancelled in the same turn: hand the turn on, or a key would lie idle.
                if getter.done() and not getter.cancelled():
                    self._wake_one()
                raise
            finally:
                if getter in self._getters:
                    self._getters.remove(getter)
        key = self._line.popleft()
        self._dirty.discard(key)
        self._added_at.pop(key, None)
        self._held_since[key] = self._clock.time()
        return key

    def done(self, key: K) -> None:
        """Ends the work on `key`; if it was added meanwhile, it goes back in line."""
        self._held_since.pop(key, None)
        if key in self._dirty:
            self._line.append(key)
            self._wake_one()

    def shut_down(self) -> None:
        """Takes in nothing more. Keys in line are still given out; delayed ones are dropped."""
        self._shut_down = True
        for delayed in self._delayed.values():
            delayed.timer.cancel()
        self._delayed.clear()
        while self._getters:
            self._wake_one()

    def _mature(self, key: K) -> None:
        del self._delayed[key]
        self.add(key)

    def _wake_one(self) -> None:
        while self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(None)
                return
