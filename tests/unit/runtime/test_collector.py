"""Statistics of pods: who is asked, what is kept, who is woken, and what is pushed."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from specserve_operator.constants import LABEL_POOL, LABEL_REVISION, LABEL_SERVICE
from specserve_operator.core.objects import ObjectRef, ServiceKey
from specserve_protos.v1alpha1 import control_pb2 as pb
from tests.fakes.clock import settle
from tests.unit.runtime.collecting import World


async def test_ready_serving_pods_are_asked_and_no_others() -> None:
    world = World()
    world.pod("d", "10.0.0.1")
    world.pod("p", "10.0.0.2", pool="prefill")
    world.pod("g", "10.0.0.3", pool="gateway")
    world.pod("starting", "10.0.0.4", ready=False)
    await world.collector.poll()
    assert sorted(world.channels.asked) == ["10.0.0.1", "10.0.0.2"]
    assert world.channels.kept == {"10.0.0.1", "10.0.0.2"}
    assert set(world.started()) == {"uid-d", "uid-p"}


async def test_a_service_is_woken_when_its_statistics_change_and_not_by_mere_time() -> None:
    world = World()
    world.pod("d", "10.0.0.1")
    assert await world.collector.poll() == [world.key]
    world.answer("d", "10.0.0.1", uptime=3.0)
    assert await world.collector.poll() == []
    world.answer("d", "10.0.0.1", uptime=5.0, started=1)
    assert await world.collector.poll() == [world.key]


async def test_one_dead_pod_does_not_hide_the_others() -> None:
    world = World()
    world.pod("a", "10.0.0.1")
    world.pod("b", "10.0.0.2")
    world.channels.answers["10.0.0.1"] = None
    await world.collector.poll()
    assert set(world.started()) == {"uid-b"}


async def test_the_last_answer_of_a_silent_pod_is_kept_for_a_while_only() -> None:
    world = World(stale_seconds=15.0)
    world.pod("a", "10.0.0.1")
    await world.collector.poll()
    world.channels.answers["10.0.0.1"] = None
    world.clock.advance(14.0)
    await world.collector.poll()
    assert set(world.started()) == {"uid-a"}
    world.clock.advance(2.0)
    assert await world.collector.poll() == [world.key]  # so that the status stops showing it
    assert world.started() == {}


async def test_totals_do_not_fall_when_a_pod_is_restarted() -> None:
    world = World()
    world.pod("a", "10.0.0.1")
    world.answer("a", "10.0.0.1", started=7, uptime=100.0)
    await world.collector.poll()
    world.channels.answers["10.0.0.1"] = None
    await world.collector.poll()
    world.answer("a", "10.0.0.1", started=1, uptime=2.0)
    await world.collector.poll()
    assert world.started() == {"uid-a": 8}


async def test_a_pod_that_is_long_not_ready_keeps_its_totals_and_one_that_is_replaced_does_not() -> None:
    world = World()
    world.pod("a", "10.0.0.1")
    world.answer("a", "10.0.0.1", started=7, uptime=100.0)
    await world.collector.poll()
    world.pod("a", "10.0.0.1", ready=False)
    world.clock.advance(3600.0)
    await world.collector.poll()
    world.pod("a", "10.0.0.1")
    world.answer("a", "10.0.0.1", started=1, uptime=2.0)
    await world.collector.poll()
    assert world.started() == {"uid-a": 8}
    world.cluster.objects.clear()
    world.pod("b", "10.0.0.1")
    await world.collector.poll()
    assert world.started() == {"uid-b": 0}


async def test_the_sum_of_transfers_keeps_pods_that_are_silent_or_gone_but_no_service_that_is() -> None:
    world = World(stale_seconds=15.0)
    world.pod("a", "10.0.0.1")
    world.answer("a", "10.0.0.1", transfers=3)
    world.pod("b", "10.0.0.2")
    world.answer("b", "10.0.0.2", transfers=4)
    await world.collector.poll()
    world.channels.answers["10.0.0.1"] = None
    world.clock.advance(60.0)
    await world.collector.poll()
    assert (set(world.started()), world.transfers()) == ({"uid-b"}, 7)
    world.answer("a", "10.0.0.1", transfers=5, uptime=90.0)
    await world.collector.poll()
    assert world.transfers() == 9
    del world.cluster.objects[ObjectRef("v1", "Pod", world.key.namespace, "b")]
    await world.collector.poll()
    assert (set(world.started()), world.transfers()) == ({"uid-a"}, 9)
    world.cluster.remove(world.key)
    await world.collector.poll()
    assert world.transfers() == 0


async def test_what_older_pods_had_counted_at_their_first_answer_is_inherited() -> None:
    world = World()
    world.clock.advance(10.0)
    world.pod("old", "10.0.0.1")
    world.answer("old", "10.0.0.1", transfers=3, uptime=100.0)
    world.pod("young", "10.0.0.2")
    world.answer("young", "10.0.0.2", transfers=4, uptime=9.0)
    await world.collector.poll()
    assert (world.transfers(), world.inherited()) == (7, 3)
    world.answer("old", "10.0.0.1", transfers=5, uptime=102.0)
    await world.collector.poll()
    assert (world.transfers(), world.inherited()) == (9, 3)
    world.answer("old", "10.0.0.1", transfers=1, uptime=1.0)  # its container was started again
    await world.collector.poll()
    assert (world.transfers(), world.inherited()) == (10, 3)
    del world.cluster.objects[ObjectRef("v1", "Pod", world.key.namespace, "old")]
    await world.collector.poll()
    assert (world.transfers(), world.inherited()) == (10, 3)


async def test_a_service_that_is_made_anew_within_one_poll_inherits_nothing() -> None:
    world = World()
    world.clock.advance(60.0)
    world.pod("gone", "10.0.0.1")
    world.answer("gone", "10.0.0.1", transfers=3)
    world.pod("leaving", "10.0.0.2")
    world.created("leaving", "2030-01-01T11:00:00Z")
    world.answer("leaving", "10.0.0.2", transfers=4)
    await world.collector.poll()
    del world.cluster.objects[ObjectRef("v1", "Pod", world.key.namespace, "gone")]
    await world.collector.poll()
    assert world.transfers() == 7
    world.make_service_anew()
    assert world.transfers() == 0  # before the next poll already
    world.pod("new", "10.0.0.3")
    world.created("new", "2030-01-01T12:00:00Z")
    world.answer("new", "10.0.0.3", transfers=2)
    await world.collector.poll()
    assert (world.transfers(), set(world.started())) == (2, {"uid-new"})
    del world.cluster.objects[ObjectRef("v1", "Pod", world.key.namespace, "leaving")]
    await world.collector.poll()
    assert world.transfers() == 2


async def test_pods_that_are_deleted_in_the_life_of_their_service_are_asked_to_their_end() -> None:
    world = World()
    world.make_service_anew()
    world.pod("leaving", "10.0.0.1")
    world.created("leaving", "2030-01-01T12:00:01Z")
    pod = world.cluster.objects[ObjectRef("v1", "Pod", world.key.namespace, "leaving")]
    pod["metadata"]["deletionTimestamp"] = "2030-01-01T13:00:00Z"
    world.answer("leaving", "10.0.0.1", transfers=4)
    await world.collector.poll()
    assert world.transfers() == 4


async def test_a_service_that_goes_while_it_is_looked_at_is_not_asked() -> None:
    world = World()
    world.pod("a", "10.0.0.1")
    listed = await world.cluster.list_services()
    world.cluster.remove(world.key)
    world.cluster.list_services = AsyncMock(return_value=listed)  # type: ignore[method-assign]
    assert await world.collector.poll() == []
    assert world.channels.asked == []


async def test_an_answer_from_another_pod_at_the_same_address_is_not_taken() -> None:
    world = World()
    world.pod("a", "10.0.0.1")
    world.answer("somebody-else", "10.0.0.1", started=5)
    await world.collector.poll()
    assert world.started() == {}


async def test_settings_are_pushed_to_decode_pods_that_are_behind() -> None:
    world = World()
    world.runtime_state()
    world.pod("behind", "10.0.0.1")
    world.answer("behind", "10.0.0.1", generation=1)
    world.pod("current", "10.0.0.2")
    world.pod("prefill", "10.0.0.3", pool="prefill")
    world.answer("prefill", "10.0.0.3", generation=0)
    await world.collector.poll()
    ((address, request),) = world.channels.pushed
    assert address == "10.0.0.1"
    assert request.generation == 2
    assert request.settings.policy == pb.LENGTH_POLICY_OFF


async def test_a_broken_state_file_pushes_nothing_and_statistics_still_come() -> None:
    world = World()
    world.runtime_state("{")
    world.pod("a", "10.0.0.1")
    await world.collector.poll()
    assert world.channels.pushed == []
    assert set(world.started()) == {"uid-a"}


async def test_a_cluster_that_cannot_be_listed_costs_one_round() -> None:
    world = World()
    world.pod("a", "10.0.0.1")
    world.cluster.fail_next("list_services")
    assert await world.collector.poll() == []
    assert await world.collector.poll() == [world.key]


async def test_services_that_are_gone_are_forgotten() -> None:
    world = World()
    world.pod("a", "10.0.0.1")
    await world.collector.poll()
    world.cluster.remove(world.key)
    await world.collector.poll()
    assert world.collector.pod_stats(world.key) == {}


async def test_running_polls_every_period_at_once_when_hastened_and_ends_with_closed_channels() -> None:
    world = World(period_seconds=2.0)
    world.pod("a", "10.0.0.1")
    woken: list[ServiceKey] = []
    task = asyncio.create_task(world.collector.run(wake=woken.append))
    await settle()
    assert len(world.channels.asked) == 1
    world.clock.advance(1.0)
    await settle()
    assert len(world.channels.asked) == 1
    world.collector.hasten()
    await settle()
    assert len(world.channels.asked) == 2
    world.clock.advance(2.0)
    await settle()
    assert len(world.channels.asked) == 3
    assert woken == [world.key]
    task.cancel()
    await settle()
    assert task.cancelled()
    assert world.channels.is_closed


def workload(revision: str, *args: str) -> dict[str, object]:
    """A Deployment of the decode pool with these arguments."""
    labels = {LABEL_SERVICE: "tiny", LABEL_POOL: "decode", LABEL_REVISION: revision}
    containers = [{"name": "engine", "args": list(args)}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"tiny-decode-{revision}", "labels": labels},
        "spec": {"template": {"spec": {"containers": containers}}},
    }


async def test_a_pod_of_a_workload_with_certificates_is_asked_for_its_own() -> None:
    world = World()
    world.pod("plain", "10.0.0.1")
    world.pod("certified", "10.0.0.2")
    for name, revision, args in (("plain", "a", ()), ("certified", "b", ("--identity-server", "operator:9443"))):
        pod = world.cluster.objects[ObjectRef("v1", "Pod", "default", name)]
        pod["metadata"]["labels"][LABEL_REVISION] = revision
        deployment = workload(revision, *args)
        world.cluster.objects[ObjectRef.of(deployment)] = deployment

    await world.collector.poll()

    assert world.channels.certified == {"10.0.0.1": None, "10.0.0.2": "uid-certified"}


@pytest.mark.parametrize("steps", range(12))
async def test_collecting_ends_when_it_is_cancelled_at_any_moment(steps: int) -> None:
    world = World()
    world.pod("d", "10.0.0.1")
    running = asyncio.create_task(world.collector.run(wake=lambda key: None))
    await settle()
    world.clock.advance(2.0)
    for _ in range(steps):
        await asyncio.sleep(0)

    running.cancel()
    await settle()

    assert running.cancelled()
