"""Statistics of pods: who is asked, what is kept, who is woken, and what is pushed."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from specserve_operator.constants import LABEL_POOL, LABEL_REVISION, LABEL_SERVICE
from specserve_operator.core.objects import ObjectRef, ServiceKey
from specserve_operator.runtime.collector import CollectorOptions, StatsCollector
from specserve_protos.v1alpha1 import control_pb2 as pb
from tests.fakes.channels import FakeChannels
from tests.fakes.clock import FakeClock, settle
from tests.fakes.cluster import MemoryCluster

SERVICE = {"metadata": {"name": "tiny"}, "spec": {}}
STATE = """{"generation": 2, "speculation":
  {"policy": "Off", "cap": "None", "minTokens": 0, "maxTokens": 8, "staticTokens": 0}}"""


class World:
    """A service with pods, a clock and a collector."""

    def __init__(self, **options: float) -> None:
        self.cluster, self.clock, self.channels = MemoryCluster(), FakeClock(), FakeChannels()
        self.key = self.cluster.put(SERVICE)
        self.uid = self.service_uid()
        self.collector = StatsCollector(
            self.cluster,
            clock=self.clock,
            options=CollectorOptions(**options),  # type: ignore[arg-type]
            channels=self.channels,  # type: ignore[arg-type]
        )

    def pod(self, name: str, ip: str, *, pool: str = "decode", ready: bool = True) -> None:
        pod = self.cluster.add_pod(name, self.key, labels={LABEL_POOL: pool}, ready=ready)
        pod["status"]["podIP"] = ip
        self.answer(name, ip)

    def answer(
        self, name: str, ip: str, *, started: int = 0, uptime: float = 1.0, generation: int = 2, transfers: int = 0
    ) -> None:
        self.channels.answers[ip] = pb.GetStatsResponse(
            pod_uid=f"uid-{name}",
            uptime_seconds=uptime,
            requests=pb.RequestStats(started=started),
            speculation=pb.SpeculationStats(generation=generation),
            kv_transfer=pb.KvTransferStats(remote_prefills=transfers),
        )

    def runtime_state(self, text: str = STATE) -> None:
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "tiny-runtime", "labels": {LABEL_SERVICE: "tiny"}},
            "data": {"state.json": text},
        }
        self.cluster.objects[ObjectRef.of(config_map)] = config_map

    def make_service_anew(self) -> None:
        """Within one poll. Pods of the old one are on their way out."""
        lingering = dict(self.cluster.objects)
        for pod in lingering.values():
            pod["metadata"]["deletionTimestamp"] = "2030-01-01T11:59:59Z"
        self.cluster.remove(self.key)
        self.cluster.put({**SERVICE, "metadata": {"name": "tiny", "creationTimestamp": "2030-01-01T12:00:00Z"}})
        self.cluster.objects |= lingering
        self.uid = self.service_uid()

    def service_uid(self) -> str:
        return str(self.cluster.services[self.key]["metadata"]["uid"])

    def created(self, name: str, time: str) -> None:
        pod = self.cluster.objects[ObjectRef("v1", "Pod", self.key.namespace, name)]
        pod["metadata"]["creationTimestamp"] = time

    def transfers(self) -> int:
        return self.collector.kv_transfer(self.key, self.uid).counted.remote_prefills

    def inherited(self) -> int:
        return self.collector.kv_transfer(self.key, self.uid).inherited.remote_prefills

    def started(self) -> dict[str, int]:
        return {uid: stats.requests.started for uid, stats in self.collector.pod_stats(self.key).items()}


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


async def test_calls_are_bounded() -> None:
    world = World(max_concurrent_calls=3)
    for i in range(10):
        world.pod(f"p{i}", f"10.0.0.{i}")
    await world.collector.poll()
    assert len(world.channels.asked) == 10
    assert world.channels.most_running == 3


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


@pytest.mark.parametrize(
    "limits", [{"max_calls_per_second": 1.0}, {"max_connections_per_second": 1.0, "kept_channels": 0}]
)
async def test_many_pods_are_asked_one_service_after_the_other_over_the_whole_period(
    limits: dict[str, Any],
) -> None:
    """Four pods at one call a second: the period is four seconds instead of two."""
    world = World(**limits)
    other = world.cluster.put({"metadata": {"name": "other"}, "spec": {}})
    for i in range(1, 5):
        world.pod(f"d{i}", f"10.0.0.{i}")
    pod = world.cluster.add_pod("x", other, labels={LABEL_POOL: "decode"})
    pod["status"]["podIP"] = "10.0.1.1"
    woken: list[ServiceKey] = []
    running = asyncio.create_task(world.collector.run(wake=woken.append))

    await settle()
    assert len(world.channels.asked) == 4
    world.clock.advance(3.9)
    await settle()
    assert len(world.channels.asked) == 4
    world.clock.advance(0.2)
    await settle()
    assert world.channels.asked[4:] == ["10.0.1.1"]
    assert woken == [world.key, other]

    # Stopping does not wait for the rest of the round.
    running.cancel()
    await settle()
    assert running.cancelled()


async def test_others_get_their_turn_while_many_services_are_looked_at() -> None:
    world, turns = World(), 0
    for number in range(40):
        world.cluster.put({"metadata": {"name": f"s{number}"}, "spec": {}})
    polling = asyncio.ensure_future(world.collector.poll())

    while not polling.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns >= 40


async def test_a_pod_that_hangs_delays_no_other_service_and_makes_no_statistics_stale() -> None:
    world = World(max_calls_per_second=1.0, stale_seconds=1.0)
    services = [world.cluster.put({"metadata": {"name": f"s{i}"}, "spec": {}}) for i in range(4)]
    for i, key in enumerate(services):
        pod = world.cluster.add_pod(f"p{i}", key, labels={LABEL_POOL: "decode"})
        pod["status"]["podIP"] = f"10.0.0.{i}"
        world.answer(f"p{i}", f"10.0.0.{i}")
    world.channels.hung["10.0.0.0"] = world.clock
    running = asyncio.create_task(world.collector.run(wake=lambda key: None))

    for _ in range(400):
        world.clock.advance(0.1)
        await settle()

    # Each one every four seconds, though the first pod takes two of them.
    assert min(world.channels.asked.count(f"10.0.0.{i}") for i in range(1, 4)) >= 9
    assert all(world.collector.pod_stats(key) for key in services[1:])
    running.cancel()
    await settle()


async def test_connections_are_kept_to_so_many_pods_and_closed_after_the_answer_of_others() -> None:
    world = World(kept_channels=2)
    world.pod("a", "10.0.0.1")
    world.pod("b", "10.0.0.2")
    await world.collector.poll()
    assert (world.channels.kept, world.channels.dropped) == ({"10.0.0.1", "10.0.0.2"}, [])

    world.pod("c", "10.0.0.3")
    await world.collector.poll()
    assert (world.channels.kept, world.channels.dropped) == ({"10.0.0.1", "10.0.0.2"}, ["10.0.0.3"])


async def test_a_round_is_as_long_as_the_new_connections_take() -> None:
    """Three pods, connections to two of them: four seconds, though three calls a second may be made."""
    world = World(kept_channels=1, max_calls_per_second=3.0, max_connections_per_second=0.5)
    for i in range(3):
        key = world.cluster.put({"metadata": {"name": f"s{i}"}, "spec": {}})
        pod = world.cluster.add_pod(f"p{i}", key, labels={LABEL_POOL: "decode"})
        pod["status"]["podIP"] = f"10.0.0.{i}"
    running = asyncio.create_task(world.collector.run(wake=lambda key: None))
    for _ in range(120):
        world.clock.advance(0.1)
        await settle()
    assert sum(ip.startswith("10.0.0.") for ip in world.channels.asked) == 9
    running.cancel()
    await settle()


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
