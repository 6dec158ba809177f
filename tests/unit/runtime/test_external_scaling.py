"""Whom a PoolScaler's fields belong to, from the reconciler to the local cluster."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specserve_operator.cluster.local import LocalCluster
from specserve_operator.cluster.protocol import SEED_FIELD_MANAGER, ApplyOutcome, ClusterError
from specserve_operator.constants import FIELD_MANAGER
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest, ObjectRef, ServiceKey
from specserve_operator.runtime.reconciler import Reconciler
from tests.fakes.clock import FakeClock
from tests.fakes.cluster import MemoryCluster
from tests.unit.runtime.reconciling import FakeStats

CONFIG = OperatorConfig("engine:1", "gateway:1", "1", local=True)
REF = ObjectRef("specserve.dev/v1alpha1", "PoolScaler", "default", "tiny-decode")


def make_service(**scaling: Any) -> Manifest:
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": "tiny", "namespace": "default"},
        "spec": {
            "model": {"uri": "file:///models/target"},
            "decode": {"scaling": {"mode": "External", "minReplicas": 2, "maxReplicas": 5, **scaling}},
        },
    }


class OwnedFields(MemoryCluster):
    """Fields of a spec belong to whoever set them first, until somebody writes them by another way."""

    def __init__(self) -> None:
        super().__init__()
        self.managers: list[tuple[str, str]] = []
        self.child_statuses: dict[ObjectRef, dict[str, Any]] = {}

    async def apply(self, obj: Manifest, *, field_manager: str = FIELD_MANAGER) -> ApplyOutcome:
        ref = ObjectRef.of(obj)
        if ref.kind == "PoolScaler":
            self.managers.append((field_manager, "with spec" if "spec" in obj else "without spec"))
        old = self.objects.get(ref)
        if field_manager != FIELD_MANAGER and old is not None:
            return ApplyOutcome.UNCHANGED
        kept = {} if old is None else {part: old[part] for part in ("spec", "status") if part in old}
        return await super().apply({**kept, **obj})

    async def patch_child_status(self, ref: ObjectRef, status: Mapping[str, Any]) -> None:
        self._maybe_fail("patch_child_status")
        self.child_statuses[ref] = dict(status)
        self.objects[ref]["status"] = copy.deepcopy(dict(status))


class World:
    def __init__(self) -> None:
        self.cluster = OwnedFields()
        self.reconciler = Reconciler(self.cluster, CONFIG, FakeStats(), FakeClock())

    def decode_replicas(self) -> int:
        labels = ((obj, obj["metadata"].get("labels", {})) for obj in self.cluster.objects.values())
        (found,) = (obj for obj, own in labels if obj["kind"] == "Deployment" and own["specserve.dev/pool"] == "decode")
        return int(found["spec"]["replicas"])


async def test_a_scaler_is_seeded_by_another_manager_and_then_only_labelled_by_ours() -> None:
    world = World()
    key = world.cluster.put(make_service())
    for _ in range(3):
        await world.reconciler.reconcile(key)
    assert world.cluster.managers[:2] == [(SEED_FIELD_MANAGER, "with spec"), (FIELD_MANAGER, "without spec")]
    assert {spec for manager, spec in world.cluster.managers if manager == FIELD_MANAGER} == {"without spec"}
    assert [manager for manager, _ in world.cluster.managers].count(SEED_FIELD_MANAGER) == 1
    scaler = world.cluster.objects[REF]
    assert scaler["spec"] == {"replicas": 2}
    assert scaler["metadata"]["labels"]["specserve.dev/service"] == "tiny"


async def test_the_pool_follows_its_scaler_and_the_scalers_status_is_written_once_for_each_change() -> None:
    world = World()
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    assert world.cluster.child_statuses[REF]["desiredReplicas"] == 2
    assert world.cluster.child_statuses[REF]["selector"] == "specserve.dev/pool=decode,specserve.dev/service=tiny"
    world.cluster.child_statuses.clear()
    await world.reconciler.reconcile(key)
    assert world.cluster.child_statuses == {}
    world.cluster.objects[REF]["spec"] = {"replicas": 4}
    await world.reconciler.reconcile(key)
    assert world.decode_replicas() == 4
    assert world.cluster.child_statuses[REF]["desiredReplicas"] == 4


async def test_a_scaler_that_somebody_made_a_moment_ago_keeps_its_number() -> None:
    """The list of children did not show it yet."""
    world = World()
    key = world.cluster.put(make_service())
    world.cluster.objects[REF] = {
        "apiVersion": REF.api_version,
        "kind": REF.kind,
        "metadata": {"name": REF.name, "namespace": "default"},
        "spec": {"replicas": 4},
    }
    await world.reconciler.reconcile(key)
    assert world.cluster.objects[REF]["spec"] == {"replicas": 4}
    await world.reconciler.reconcile(key)
    assert world.decode_replicas() == 4


async def test_a_scaler_that_cannot_be_made_is_told_of_and_the_pool_is_served() -> None:
    world = World()
    key = world.cluster.put(make_service())
    refused = ClusterError("may not create poolscalers", retryable=False)

    async def refuse(obj: Manifest, *, field_manager: str = FIELD_MANAGER) -> ApplyOutcome:
        if obj["kind"] == "PoolScaler":
            raise refused
        return await MemoryCluster.apply(world.cluster, obj)

    world.cluster.apply = refuse  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match="may not create poolscalers"):
        await world.reconciler.reconcile(key)
    assert world.decode_replicas() == 2
    assert world.cluster.child_statuses == {}
    conditions = world.cluster.services[key]["status"]["conditions"]
    (ready,) = (c for c in conditions if c["type"] == "Ready")
    assert (ready["reason"], "PoolScaler tiny-decode" in ready["message"]) == ("ApplyFailed", True)


async def test_the_scaler_is_deleted_when_the_spec_decides_again() -> None:
    world = World()
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    world.cluster.put(make_service(mode="Auto", minReplicas=3, maxReplicas=3))
    await world.reconciler.reconcile(key)
    assert REF in world.cluster.deleted
    assert world.decode_replicas() == 3


async def test_the_local_cluster_keeps_the_number_of_a_scaler_apart_from_our_fields(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    bare = {"apiVersion": REF.api_version, "kind": REF.kind, "metadata": {"name": REF.name, "namespace": "default"}}
    labelled = {**bare, "metadata": {**bare["metadata"], "labels": {"specserve.dev/service": "tiny"}}}
    with pytest.raises(ClusterError, match="no PoolScaler tiny-decode yet"):
        await cluster.scale_pool("default", REF.name, 3)
    seed = {**bare, "spec": {"replicas": 2}}
    assert await cluster.apply(seed, field_manager=SEED_FIELD_MANAGER) is ApplyOutcome.CREATED
    assert await cluster.apply(labelled) is ApplyOutcome.CONFIGURED
    assert await cluster.scale_pool("default", REF.name, 3) is ApplyOutcome.CONFIGURED
    assert await cluster.apply(seed, field_manager=SEED_FIELD_MANAGER) is ApplyOutcome.UNCHANGED
    assert await cluster.apply(labelled) is ApplyOutcome.UNCHANGED
    await cluster.patch_child_status(REF, {"replicas": 2})
    (found,) = await cluster.list_owned(ServiceKey("default", "tiny"))
    assert (found["spec"], found["status"]) == ({"replicas": 3}, {"replicas": 2})
    assert found["metadata"]["generation"] == 2
