"""A clock that moves only when a test says so."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

EPOCH = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    """Implements `specserve_operator.runtime.clock.Clock`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._order = itertools.count()

    def utc_now(self) -> datetime:
        return EPOCH + timedelta(seconds=self._now)

    def time(self) -> float:
        return self._now

    def call_later(self, delay_seconds: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (self._now + delay_seconds, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Moves on, running what becomes due at the moment it becomes due."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            if timer.callback is not None:
                callback, timer.callback = timer.callback, None
                callback()
        self._now = end


async def settle() -> None:
    """Lets every task that can run do so, without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)
