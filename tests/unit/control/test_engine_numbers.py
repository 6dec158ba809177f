import asyncio
from typing import Any

import pytest

from specserve_workers.control import engine as engine_module
from specserve_workers.control.engine import EngineNumbers, EngineUnavailableError


class FakeEngine:
    def __init__(self) -> None:
        self.asked = 0
        self.open_leases = 0
        self.error: Exception | None = None

    async def set_speculation(self, state: Any) -> None:
        raise AssertionError("not asked here")

    async def speculation_stats(self) -> dict[str, Any]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return {"draft_forwards": self.asked}

    async def kv_stats(self) -> dict[str, Any]:
        return {"open_leases": self.open_leases}


class Ticks:
    """Stands for sleeping: one turn of the loop at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns: asyncio.Queue[None] = asyncio.Queue()
        real_sleep = asyncio.sleep

        async def sleep(seconds: float) -> None:
            assert seconds == engine_module.REFRESH_SECONDS
            await self._turns.get()

        monkeypatch.setattr(engine_module.asyncio, "sleep", sleep)
        self._sleep = real_sleep

    async def turn(self) -> None:
        self._turns.put_nowait(None)
        for _ in range(5):
            await self._sleep(0)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


async def test_the_engine_is_asked_only_while_its_numbers_can_change(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    ticks = Ticks(monkeypatch)
    activity, busy = [0], [False]
    numbers = EngineNumbers(engine, activity=lambda: activity[0])
    task = asyncio.create_task(numbers.keep_fresh(is_busy=lambda: busy[0]))
    await ticks.turn()
    first = engine.asked
    await ticks.turn()
    await ticks.turn()
    assert engine.asked == first, "nothing happens in an idle pod"
    busy[0] = True
    await ticks.turn()
    await ticks.turn()
    assert engine.asked == first + 2
    busy[0], activity[0] = False, 1
    await ticks.turn()
    await ticks.turn()
    assert engine.asked == first + 3, "once more after the last request"
    engine.open_leases = 1
    await numbers.refresh()
    await ticks.turn()
    assert engine.asked == first + 5, "leases end by themselves"
    task.cancel()


@pytest.mark.parametrize("error", [EngineUnavailableError("dead"), KeyError("a defect")])
async def test_refreshing_goes_on_after_a_failure(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    ticks = Ticks(monkeypatch)
    numbers = EngineNumbers(engine, activity=lambda: 0)
    engine.error = error
    task = asyncio.create_task(numbers.keep_fresh(is_busy=lambda: True))
    await ticks.turn()
    engine.error = None
    await ticks.turn()
    assert numbers.speculation["draft_forwards"] == engine.asked
    task.cancel()
