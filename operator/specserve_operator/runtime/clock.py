"""Time as an argument: the system's clock in production, one that tests advance by hand elsewhere."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol


class TimerHandle(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None:
        """Forgets the call. Cancelling twice, or after it ran, is no error."""
        ...


class Clock(Protocol):
    """What the runtime needs to know of time."""

    def utc_now(self) -> datetime:
        """Wall-clock time, for what users see."""
        ...

    def time(self) -> float:
        """Seconds on a clock that never runs backwards, for what the program waits for."""
        ...

    def call_later(self, delay_seconds: float, callback: Callable[[], None]) -> TimerHandle:
        """Runs `callback` in the event loop after `delay_seconds`."""
        ...


class SystemClock:
    """The running event loop's time."""

    def utc_now(self) -> datetime:
        return datetime.now(UTC)

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, delay_seconds: float, callback: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(delay_seconds, callback)


async def sleep(clock: Clock, delay_seconds: float) -> None:
    """Waits on `clock` rather than on the event loop."""
    is_over = asyncio.Event()
    handle = clock.call_later(delay_seconds, is_over.set)
    try:
        await is_over.wait()
    finally:
        handle.cancel()
