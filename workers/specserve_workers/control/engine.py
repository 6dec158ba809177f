"""What the control plane of a pod asks of its engine, and the numbers of the engine as last heard."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from specserve_workers.control.runtime_state import RuntimeState

logger = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 1.0


class EngineUnavailableError(RuntimeError):
    """The engine did not answer a control call."""


class Engine(Protocol):
    """The engine, as far as it can be asked between its steps. Every call takes up to one step."""

    async def set_speculation(self, state: RuntimeState) -> None:
        """Brings settings into force on all ranks. Raises EngineUnavailableError."""

    async def speculation_stats(self) -> Mapping[str, Any]:
        """Fields of `SpeculationStats` in control.proto."""

    async def kv_stats(self) -> Mapping[str, Any]:
        """Fields of `KvTransferStats` in control.proto; empty without a KV connector."""


class EngineNumbers:
    """Refreshes the engine's numbers behind the callers' backs, and only while they can have changed."""

    def __init__(self, engine: Engine, *, activity: Callable[[], int]) -> None:
        """`activity` grows with every request that begins or ends."""
        self._engine = engine
        self._activity = activity
        self._seen: tuple[int, bool] | None = None
        self.speculation: Mapping[str, Any] = {}
        self.kv_transfer: Mapping[str, Any] = {}

    @property
    def open_leases(self) -> int:
        return int(self.kv_transfer.get("open_leases", 0))

    async def refresh(self) -> None:
        """Asks the engine once. Numbers of before stay where it does not answer."""
        try:
            self.speculation = await self._engine.speculation_stats()
            self.kv_transfer = await self._engine.kv_stats()
        except EngineUnavailableError as error:
            logger.warning("statistics are old: %s", error)

    async def try_refresh(self) -> None:
        """As `refresh`, but never raises."""
        try:
            await self.refresh()
        except Exception:
            logger.exception("statistics could not be refreshed")

    async def keep_fresh(self, *, is_busy: Callable[[], bool]) -> None:
        """Refreshes every second while requests run, once more after they ended, and while leases are open."""
        while True:
            now = (self._activity(), is_busy())
            if now != self._seen or now[1] or self.open_leases:
                await self.try_refresh()
            self._seen = now
            await asyncio.sleep(REFRESH_SECONDS)
