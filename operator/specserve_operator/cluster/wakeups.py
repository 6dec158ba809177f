"""How controllers are woken: a set of keys that need a look, however often they changed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
_RETRY_SECONDS = 1.0


class DirtyKeys(Generic[K]):
    """Keys wait here until somebody takes them. A key that is added twice meanwhile is taken once."""

    def __init__(self) -> None:
        self._keys: dict[K, None] = {}  # a dict keeps the order of arrival
        self._not_empty = asyncio.Event()

    def add(self, key: K) -> None:
        self._keys[key] = None
        self._not_empty.set()

    async def take(self) -> list[K]:
        """All keys that wait, the longest waiting first; waits until there is one."""
        await self._not_empty.wait()
        keys = list(self._keys)
        self._keys.clear()
        self._not_empty.clear()
        return keys


async def serve(name: str, keys: DirtyKeys[K], reconcile: Callable[[K], Awaitable[None]]) -> None:
    """Runs `reconcile` for every key that is added, for ever. A key that fails is logged and tried again."""
    loop = asyncio.get_running_loop()
    while True:
        for key in await keys.take():
            try:
                await reconcile(key)
            except Exception:
                logger.exception("%s: %s failed, trying again", name, key)
                loop.call_later(_RETRY_SECONDS, keys.add, key)
