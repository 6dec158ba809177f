"""A control plane that is started again finds pods that have counted for long: that is no news."""

from typing import Any

from specserve_operator.constants import LABEL_POOL
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import ServiceKey
from specserve_operator.runtime.collector import StatsCollector
from specserve_operator.runtime.reconciler import Reconciler
from specserve_protos.v1alpha1 import control_pb2 as pb
from tests.fakes.channels import FakeChannels
from tests.fakes.clock import FakeClock
from tests.fakes.cluster import MemoryCluster

CONFIG = OperatorConfig("engine:1", "gateway:1", "1", local=True)
SERVICE: dict[str, Any] = {
    "apiVersion": "specserve.dev/v1alpha1",
    "kind": "SpeculativeService",
    "metadata": {"name": "tiny", "namespace": "default"},
    "spec": {
        "model": {"uri": "file:///models/target"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 2},
        "speculation": {"draft": {"method": "DraftModel", "uri": "file:///models/draft"}},
    },
}
DSDE = pb.SpeculationSettings(policy=pb.LENGTH_POLICY_DSDE, max_tokens=4)


class World:
    """Pods that go on while control planes come and go."""

    def __init__(self) -> None:
        self.cluster, self.clock, self.channels = MemoryCluster(), FakeClock(), FakeChannels()
        self.key: ServiceKey = self.cluster.put(SERVICE)
        self.started: dict[str, float] = {}
        self.start_control_plane()

    def start_control_plane(self) -> None:
        self.collector = StatsCollector(
            self.cluster,
            clock=self.clock,
            channels=self.channels,  # type: ignore[arg-type]
        )
        self.reconciler = Reconciler(self.cluster, CONFIG, self.collector, self.clock)

    def restart_control_plane(self, *, after_seconds: float = 30.0) -> None:
        self.clock.advance(after_seconds)
        self.start_control_plane()

    def pod(self, ip: str, *, pool: str = "decode", ready: bool = True) -> None:
        self.started.setdefault(ip, self.clock.time())
        pod = self.cluster.add_pod(f"pod-{ip}", self.key, labels={LABEL_POOL: pool}, ready=ready)
        pod["status"]["podIP"] = ip

    def count(self, ip: str, *, transfers: int = 0, fallbacks: int = 0) -> None:
        """What the pod has counted so far. It answers."""
        self.channels.answers[ip] = pb.GetStatsResponse(
            pod_uid=f"uid-pod-{ip}",
            pool="decode",
            uptime_seconds=self.clock.time() - self.started[ip],
            speculation=pb.SpeculationStats(in_force=DSDE, generation=9),
            kv_transfer=pb.KvTransferStats(
                remote_prefills=transfers,
                loaded_tokens=100 * transfers,
                loaded_bytes=1000 * transfers,
                fallbacks=[pb.Fallback(cause="connect", count=fallbacks)],
            ),
        )

    async def look(self) -> list[str]:
        """Asks the pods, reconciles, and returns the events about KV transfer and speculation that came of it."""
        known = len(self.cluster.events)
        await self.collector.poll()
        await self.reconciler.reconcile(self.key)
        told = [event for _, event in self.cluster.events[known:]]
        return [f"{e.reason}: {e.message}" for e in told if e.reason.startswith(("KVTransfer", "Speculation"))]

    def remove_pods(self, *ips: str) -> None:
        names = {f"pod-{ip}" for ip in ips}
        self.cluster.objects = {r: o for r, o in self.cluster.objects.items() if r.name not in names}

    @property
    def kv_transfer_ready(self) -> tuple[str, str]:
        """Status and reason."""
        conditions = self.cluster.services[self.key]["status"]["conditions"]
        (found,) = (c for c in conditions if c["type"] == "KVTransferReady")
        return found["status"], found["reason"]

    @property
    def totals(self) -> dict[str, int]:
        found: dict[str, int] = self.cluster.services[self.key]["status"]["kvTransfer"]
        return found


async def world_with_history() -> World:
    """Two decode pods with 4 and 6 fallbacks, all of which are told."""
    world = World()
    world.pod("10.0.0.1", pool="prefill")
    world.pod("10.0.0.2")
    world.pod("10.0.0.3")
    await world.look()
    world.clock.advance(60.0)
    world.count("10.0.0.2", transfers=3, fallbacks=4)
    world.count("10.0.0.3", transfers=5, fallbacks=6)
    told = await world.look()
    assert [t.split(":")[0] for t in told] == ["SpeculationEnabled", "KVTransferFallback"]
    assert world.totals == {"transfers": 8, "fallbacks": 10, "bytes": 8000, "tokens": 800}
    return world


async def test_pods_that_answer_one_after_the_other_are_no_news() -> None:
    world = await world_with_history()
    late = world.channels.answers.pop("10.0.0.3")
    world.restart_control_plane()
    before = dict(world.totals)
    assert await world.look() == []
    world.channels.answers["10.0.0.3"] = late
    late.uptime_seconds += 30
    assert await world.look() == []
    assert world.totals == before


async def test_a_status_that_is_written_before_any_pod_has_answered_is_no_news() -> None:
    world = await world_with_history()
    before = dict(world.totals)
    world.restart_control_plane()
    known = len(world.cluster.events)
    await world.reconciler.reconcile(world.key)
    assert world.cluster.events[known:] == []
    assert world.cluster.services[world.key]["status"]["speculation"]["state"] == "On"
    assert await world.look() == []
    assert world.totals == before


async def test_what_was_measured_under_another_spec_does_not_stand() -> None:
    world = await world_with_history()
    world.restart_control_plane()
    world.cluster.put({**SERVICE, "spec": {**SERVICE["spec"], "decode": {"replicas": 3}}})

    await world.reconciler.reconcile(world.key)

    assert world.kv_transfer_ready == ("Unknown", "MetricsStale")


async def test_what_was_measured_stands_until_the_pods_have_been_asked_again() -> None:
    world = await world_with_history()
    before, writes = world.cluster.services[world.key]["status"], world.cluster.status_writes
    assert world.kv_transfer_ready == ("True", "Transferring")

    world.restart_control_plane()
    await world.reconciler.reconcile(world.key)

    assert (world.cluster.services[world.key]["status"], world.cluster.status_writes) == (before, writes)
    world.channels.answers.clear()
    woken = await world.collector.poll()
    assert woken == [world.key]
    await world.reconciler.reconcile(world.key)
    assert world.kv_transfer_ready == ("Unknown", "MetricsStale")


async def test_what_happens_after_the_restart_is_told_once_and_counted() -> None:
    world = await world_with_history()
    world.restart_control_plane()
    await world.look()
    world.count("10.0.0.2", transfers=4, fallbacks=5)
    (told,) = await world.look()
    assert told.startswith("KVTransferFallback: decode pods prefilled prompts themselves")
    assert (world.totals["fallbacks"], world.totals["transfers"]) == (11, 9)


async def test_what_happened_while_no_control_plane_ran_is_told_as_far_as_it_is_known() -> None:
    world = await world_with_history()
    world.clock.advance(10.0)
    world.count("10.0.0.2", transfers=3, fallbacks=7)
    world.count("10.0.0.3", transfers=5, fallbacks=6)
    world.restart_control_plane()
    (told,) = await world.look()
    assert told.startswith("KVTransferFallback: decode pods prefilled prompts themselves")
    assert world.totals["fallbacks"] == 13


async def test_totals_keep_pods_that_an_earlier_control_plane_knew() -> None:
    world = await world_with_history()
    world.remove_pods("10.0.0.3")
    world.restart_control_plane()
    assert await world.look() == []
    assert world.totals["fallbacks"] == 10
    world.pod("10.0.0.4")
    world.clock.advance(5.0)
    world.count("10.0.0.4", fallbacks=2)
    (told,) = await world.look()
    assert told.startswith("KVTransferFallback: decode pods prefilled prompts themselves")
    assert world.totals["fallbacks"] == 12


async def test_growth_without_a_control_plane_shows_only_beyond_what_replaced_pods_had_counted() -> None:
    world = await world_with_history()
    world.remove_pods("10.0.0.3")  # with 6 of the 10 fallbacks
    await world.look()
    world.clock.advance(10.0)
    world.count("10.0.0.2", transfers=3, fallbacks=9)
    world.restart_control_plane()
    assert await world.look() == []  # 5 more, which nothing in the totals tells from the old 6
    assert world.totals["fallbacks"] == 10
    world.clock.advance(10.0)
    world.count("10.0.0.2", transfers=3, fallbacks=12)
    world.restart_control_plane()
    (told,) = await world.look()
    assert told.startswith("KVTransferFallback: decode pods prefilled prompts themselves")
    assert world.totals["fallbacks"] == 12


async def test_old_fallbacks_are_no_failure_of_new_pods() -> None:
    world = await world_with_history()
    world.remove_pods("10.0.0.1", "10.0.0.2", "10.0.0.3")
    world.restart_control_plane()
    assert await world.look() == []
    assert world.kv_transfer_ready == ("False", "NoPrefillPeers")
    world.pod("10.0.0.4", pool="prefill")
    world.pod("10.0.0.5")
    world.count("10.0.0.5")
    told = await world.look()
    assert world.totals["fallbacks"] == 10
    assert world.kv_transfer_ready == ("Unknown", "NoTraffic")
    assert told == []
    world.count("10.0.0.5", fallbacks=1)
    await world.look()
    assert world.kv_transfer_ready == ("False", "TransferFailing")


async def test_a_service_that_is_made_anew_begins_at_zero() -> None:
    world = await world_with_history()
    world.cluster.remove(world.key)
    world.cluster.put(SERVICE)
    await world.reconciler.reconcile(world.key)  # before the collector has looked again
    assert world.totals == {"transfers": 0, "fallbacks": 0, "bytes": 0, "tokens": 0}
    world.pod("10.0.0.4")
    world.count("10.0.0.4", transfers=1)
    await world.look()
    assert world.totals["transfers"] == 1


async def test_a_pool_that_was_away_for_a_while_brings_no_old_news() -> None:
    world = await world_with_history()
    without = {name: part for name, part in SERVICE["spec"].items() if name != "prefill"}
    world.cluster.put({**SERVICE, "spec": without})
    assert await world.look() == []
    assert "kvTransfer" not in world.cluster.services[world.key]["status"]
    world.cluster.put(SERVICE)
    assert await world.look() == []
    assert world.totals["fallbacks"] == 10
