"""A service whose pods answer, for tests of the collector."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from specserve_operator.constants import LABEL_POOL, LABEL_SERVICE
from specserve_operator.core.objects import Manifest, ObjectRef, ServiceKey
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

    def pod(
        self, name: str, ip: str, *, key: ServiceKey | None = None, pool: str = "decode", ready: bool = True
    ) -> Manifest:
        """Of `key`, by default the first service. It answers."""
        pod = self.cluster.add_pod(name, key or self.key, labels={LABEL_POOL: pool}, ready=ready)
        pod["status"]["podIP"] = ip
        self.answer(name, ip)
        return pod

    def services_with_a_pod(self, count: int) -> list[ServiceKey]:
        """Services s0, s1, ... beside the first; the pod of each is at 10.0.0.<number>."""
        keys = [self.cluster.put({"metadata": {"name": f"s{i}"}, "spec": {}}) for i in range(count)]
        for i, key in enumerate(keys):
            self.pod(f"p{i}", f"10.0.0.{i}", key=key)
        return keys

    @contextlib.asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.collector.run(wake=lambda key: None))
        await settle()
        yield
        running.cancel()
        await settle()

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

    async def pass_time(self, seconds: float) -> None:
        end = self.clock.time() + seconds
        while self.clock.time() < end - 1e-9:
            self.clock.advance(0.1)
            await settle()

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
