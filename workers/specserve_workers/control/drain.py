"""Leaving service: no new requests, the running ones to their end, then the rest is cut."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def _nothing_to_refresh() -> None:
    pass


class DrainState:
    """Counts running requests and says whether new ones are accepted. There is no way back from draining."""

    def __init__(
        self,
        *,
        is_held: Callable[[], bool] = lambda: False,
        refresh: Callable[[], Awaitable[None]] = _nothing_to_refresh,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_held`: whether something besides requests keeps the pod, such as prompts that nobody has fetched yet.

        `refresh` brings up to date what `is_held` reads. It is awaited once the last request has ended, since what
        that request leaves held may not be known yet. It must not raise.
        """
        self._clock = clock
        self._began_at: float | None = None
        self._running: set[asyncio.Task[object]] = set()
        self._is_held = is_held
        self._refresh = refresh
        self._idle = asyncio.Event()
        self._idle.set()
        self.expired = False

    @property
    def draining(self) -> bool:
        return self._began_at is not None

    @property
    def running(self) -> int:
        return len(self._running)

    def enter(self, task: asyncio.Task[object]) -> None:
        self._running.add(task)
        self._idle.clear()

    def leave(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not self._running:
            self._idle.set()

    def start(self) -> None:
        if self._began_at is None:
            self._began_at = self._clock()

    async def wait(self, timeout_seconds: float) -> bool:
        """Starts draining and waits; False when the time is up with requests still running.

        The time counts from when draining began, whoever began it: a stop hook and the signal after it do not wait
        twice.
        """
        self.start()
        assert self._began_at is not None, "start() sets it"
        left_seconds = timeout_seconds - (self._clock() - self._began_at)
        try:
            async with asyncio.timeout(max(0.0, left_seconds)):
                await self._idle.wait()
                if left_seconds > 0:
                    await self._refresh()
                while self._is_held():  # noqa: ASYNC110 - what it asks is polled as well
                    await asyncio.sleep(0.1)
        except TimeoutError:
            return False
        return True

    async def cut(self) -> int:
        """Ends what is still running, with an error that its clients can read; returns how many there were."""
        self.expired = True
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)
        return len(tasks)
