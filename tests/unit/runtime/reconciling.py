"""A reconciler over a cluster that is a dict, with a clock and statistics that tests set."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from specserve_operator.constants import LABEL_POOL, LABEL_REVISION, LABEL_SERVICE, LABEL_TARGET_REVISION
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest, ServiceKey
from specserve_operator.core.stats import PodStats, TransferTotals
from specserve_operator.runtime.reconciler import Reconciler, ReconcilerOptions
from tests.fakes.clock import FakeClock, settle
from tests.fakes.cluster import MemoryCluster

CONFIG = OperatorConfig("engine:1", "gateway:1", "1", local=True)


def make_service(name: str = "tiny", **spec: Any) -> Manifest:
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"uri": "file:///models/target"}, "decode": {"replicas": 2}, **spec},
    }


class FakeStats:
    """Implements `StatsSource`."""

    def __init__(self) -> None:
        self.hastened = 0
        self.is_asked = True
        self.pods: dict[str, PodStats] = {}

    def pod_stats(self, key: ServiceKey) -> Mapping[str, PodStats]:
        return self.pods

    def kv_transfer(self, key: ServiceKey, service_uid: str) -> TransferTotals:
        return TransferTotals()

    def has_asked(self, key: ServiceKey) -> bool:
        return self.is_asked

    def hasten(self) -> None:
        self.hastened += 1

    async def run(self, *, wake: Callable[[ServiceKey], None]) -> None:
        self.wake = wake
        await asyncio.Event().wait()


class World:
    def __init__(self, **options: Any) -> None:
        self.cluster, self.clock, self.stats = MemoryCluster(), FakeClock(), FakeStats()
        self.reconciler = Reconciler(self.cluster, CONFIG, self.stats, self.clock, options=ReconcilerOptions(**options))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        task = asyncio.create_task(self.reconciler.run(stop))
        await settle()
        yield
        stop.set()
        await asyncio.wait_for(task, timeout=5)

    def named(self, kind: str) -> list[str]:
        return sorted(ref.name for ref in self.cluster.objects if ref.kind == kind)

    def deployment(self, pool: str) -> Manifest:
        return next(
            obj
            for ref, obj in self.cluster.objects.items()
            if ref.kind == "Deployment" and obj["metadata"]["labels"][LABEL_POOL] == pool
        )

    def bring_up(self, key: ServiceKey) -> None:
        """Makes the pods that the service's Deployments ask for, all ready."""
        for ref, obj in list(self.cluster.objects.items()):
            if ref.kind == "Deployment" and obj["metadata"]["labels"][LABEL_SERVICE] == key.name:
                labels = obj["metadata"]["labels"]
                names = (LABEL_POOL, LABEL_REVISION, LABEL_TARGET_REVISION)
                for i in range(obj["spec"]["replicas"]):
                    own = {name: labels[name] for name in names if name in labels}
                    self.cluster.add_pod(f"{ref.name}-{i}", key, labels=own)


def condition(service: Manifest, kind: str) -> dict[str, Any]:
    return next(c for c in service["status"]["conditions"] if c["type"] == kind)
