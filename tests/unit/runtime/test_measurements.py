"""How often a status is written in which only measured numbers are new."""

from typing import Any

import pytest

from specserve_operator.constants import LABEL_POOL
from specserve_operator.core.objects import ServiceKey
from tests.fakes.clock import settle
from tests.unit.core.builders import decode_stats_of
from tests.unit.runtime.reconciling import World, condition, make_service


def measured(world: World, key: ServiceKey, *, requests: int) -> None:
    """Each decode pod has answered so many requests so far."""
    pods = [obj for ref, obj in world.cluster.objects.items() if ref.kind == "Pod"]
    decode = [pod for pod in pods if pod["metadata"]["labels"][LABEL_POOL] == "decode"]
    world.stats.pods = {
        pod["metadata"]["uid"]: decode_stats_of(pod, ttft_counts=[requests, 0, 0, 0, 0]) for pod in decode
    }


async def ready_world(**options: Any) -> tuple[World, ServiceKey]:
    world = World(**options)
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    world.bring_up(key)
    await world.reconciler.reconcile(key)
    await world.reconciler.reconcile(key)
    return world, key


def samples(world: World, key: ServiceKey) -> int:
    return int(world.cluster.services[key]["status"]["latency"]["timeToFirstToken"][0]["samples"])


async def test_newer_numbers_alone_are_written_from_time_to_time() -> None:
    world, key = await ready_world(measurement_seconds=10.0)
    world.clock.advance(10.0)
    measured(world, key, requests=1)
    await world.reconciler.reconcile(key)
    assert samples(world, key) == 2
    writes = world.cluster.status_writes
    for second in range(1, 10):
        world.clock.advance(1.0)
        measured(world, key, requests=1 + second)
        assert await world.reconciler.reconcile(key) == pytest.approx(10.0 - second)
    assert world.cluster.status_writes == writes
    world.clock.advance(1.0)
    assert await world.reconciler.reconcile(key) is None
    assert (world.cluster.status_writes, samples(world, key)) == (writes + 1, 20)


async def test_before_its_pods_are_asked_a_service_is_neither_written_nor_looked_at_again() -> None:
    world, key = await ready_world(measurement_seconds=10.0, resync_seconds=300.0)
    world.clock.advance(10.0)
    measured(world, key, requests=1)
    await world.reconciler.reconcile(key)
    writes = world.cluster.status_writes
    world.stats.pods, world.stats.is_asked = {}, False
    world.clock.advance(60.0)

    assert await world.reconciler.reconcile(key) == 300.0
    assert (world.cluster.status_writes, samples(world, key)) == (writes, 2)


async def test_what_is_more_than_newer_numbers_is_written_at_once_with_them() -> None:
    world, key = await ready_world(measurement_seconds=10.0)
    world.clock.advance(10.0)
    measured(world, key, requests=1)
    await world.reconciler.reconcile(key)
    measured(world, key, requests=5)
    pod = next(obj for ref, obj in world.cluster.objects.items() if ref.kind == "Pod" and "decode" in ref.name)
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    await world.reconciler.reconcile(key)
    assert condition(world.cluster.services[key], "Ready")["status"] == "False"
    assert samples(world, key) == 10


async def test_statistics_wake_a_service_when_its_turn_has_come() -> None:
    world, key = await ready_world(measurement_seconds=10.0)
    async with world.running():
        world.clock.advance(10.0)
        measured(world, key, requests=1)
        world.stats.wake(key)
        await settle()
        assert samples(world, key) == 2
        writes = world.cluster.status_writes
        measured(world, key, requests=2)
        world.stats.wake(key)
        world.clock.advance(9.0)
        await settle()
        assert world.cluster.status_writes == writes
        world.clock.advance(1.5)
        await settle()
        assert (world.cluster.status_writes, samples(world, key)) == (writes + 1, 4)


async def test_many_services_with_newer_numbers_wait_in_line() -> None:
    world, first = await ready_world(measurement_seconds=10.0, measurements_per_second=0.1)
    others = [world.cluster.put(make_service(name=name)) for name in ("a", "b")]
    for other in others:
        await world.reconciler.reconcile(other)
        world.bring_up(other)
        await world.reconciler.reconcile(other)
        await world.reconciler.reconcile(other)
    world.clock.advance(10.0)
    measured(world, first, requests=1)
    keys = [first, *others]

    waits = [await world.reconciler.reconcile(key) for key in keys]

    assert waits == [None, pytest.approx(10.0), pytest.approx(20.0)]
    world.clock.advance(20.0)
    assert [await world.reconciler.reconcile(key) for key in keys[1:]] == [None, None]
    measured(world, first, requests=2)
    assert [await world.reconciler.reconcile(key) for key in keys] == [pytest.approx(10.0 * n) for n in (1, 2, 3)]


async def test_a_service_that_is_written_for_other_reasons_takes_no_second_place_in_the_line() -> None:
    world, key = await ready_world(measurement_seconds=10.0, measurements_per_second=0.1)
    pod = next(obj for ref, obj in world.cluster.objects.items() if ref.kind == "Pod" and "decode" in ref.name)
    for flap in range(6):
        measured(world, key, requests=1 + flap)
        assert await world.reconciler.reconcile(key) == pytest.approx(10.0)
        pod["status"]["conditions"] = [{"type": "Ready", "status": str(bool(flap % 2))}]
        await world.reconciler.reconcile(key)
    world.clock.advance(10.0)

    measured(world, key, requests=9)
    await world.reconciler.reconcile(key)

    assert samples(world, key) == 18


async def test_a_turn_that_came_for_nothing_is_given_up() -> None:
    world, key = await ready_world(measurement_seconds=1.0, measurements_per_second=0.1)
    async with world.running():
        world.stats.wake(key)  # its numbers are what they were
        world.clock.advance(1.5)
        await settle()
        writes = world.cluster.status_writes
        measured(world, key, requests=1)
        world.stats.wake(key)
        await settle()
        assert world.cluster.status_writes == writes
        world.clock.advance(9.0)
        await settle()
        assert (world.cluster.status_writes, samples(world, key)) == (writes + 1, 2)
