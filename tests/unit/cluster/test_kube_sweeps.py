"""When everything is listed."""

import asyncio

import pytest

from specserve_operator.cluster.kube import cluster
from specserve_operator.cluster.kube.cluster import keep_in_step
from specserve_operator.cluster.protocol import ClusterError
from tests.fakes.clock import settle


class Sweeps:
    """Counts them; fails as often as asked. `succeeded` is set after that."""

    def __init__(self, failures: int = 0) -> None:
        self.count, self.failures = 0, failures
        self.succeeded = asyncio.Event()

    async def __call__(self) -> None:
        self.count += 1
        if self.count <= self.failures:
            raise ClusterError("the API server does not answer")
        self.succeeded.set()


async def run(sweeps: Sweeps, asked: asyncio.Event) -> None:
    """Until one has succeeded, and a little longer."""
    task = asyncio.ensure_future(keep_in_step(sweeps, asked, period_seconds=3600.0))
    await asyncio.wait_for(sweeps.succeeded.wait(), 5)
    await asyncio.sleep(0.1)
    task.cancel()
    await settle()


@pytest.mark.parametrize("failures", [0, 3])
async def test_a_sweep_that_fails_is_tried_again_soon_until_one_has_not(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(cluster, "_SWEEP_RETRY_SECONDS", 0.01)
    sweeps, asked = Sweeps(failures), asyncio.Event()
    asked.set()

    await run(sweeps, asked)

    assert sweeps.count == failures + 1


async def test_watches_that_begin_anew_together_cause_one_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_SETTLE_SECONDS", 0.05)
    sweeps, asked = Sweeps(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for delay in (0.0, 0.01, 0.02):
        loop.call_later(delay, asked.set)

    await run(sweeps, asked)

    assert sweeps.count == 1
