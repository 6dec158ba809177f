"""A cluster of plain objects with operators of several versions, and what is asked of it about pods and records."""

from dataclasses import replace

import pytest

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.names import Pool
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import Plan
from specserve_operator.core.status import compute_status
from tests.unit.core.builders import (
    CONFIG,
    FakeCluster,
    deployments_of,
    make_snapshot,
    operator,
)

NEW_IMAGES = replace(CONFIG, default_engine_image="registry.test/engine:2", gateway_image="registry.test/gateway:2")
DECODE_ARGS = {"replicas": 2, "args": ["--max-num-seqs", "4"]}
TARGET_B = {"uri": "file:///models/target-b"}


def settle(cluster: FakeCluster, service: SpeculativeService, *, version: int = 1) -> None:
    """Lets an operator of that version work until nothing changes any more."""
    with operator(version):
        for _ in range(60):
            before = cluster.children()
            cluster.step(service)
            if cluster.children() == before:
                return
    pytest.fail("the cluster does not come to rest")


def running(service: SpeculativeService) -> FakeCluster:
    cluster = FakeCluster()
    settle(cluster, service)
    return cluster


def pods(cluster: FakeCluster) -> dict[str, str]:
    """The names of the Deployments at rest, by pool."""
    found = {str(pool): deployments_of(cluster.children(), pool) for pool in Pool}
    return {pool: one["metadata"]["name"] for pool, (one,) in ((p, d) for p, d in found.items() if d)}


def templates(cluster: FakeCluster) -> dict[str, Manifest]:
    return {name: obj["spec"]["template"] for (kind, name), obj in cluster.objects.items() if kind == "Deployment"}


def image(cluster: FakeCluster, pool: str) -> str:
    (deployment,) = deployments_of(cluster.children(), pool)
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def target_revisions(cluster: FakeCluster) -> set[str]:
    deployments = [d for pool in ("prefill", "decode") for d in deployments_of(cluster.children(), pool)]
    return {d["metadata"]["labels"]["specserve.dev/target-revision"] for d in deployments}


def records(cluster: FakeCluster) -> list[Manifest]:
    """Oldest first."""
    found = [obj for (kind, _), obj in cluster.objects.items() if kind == "ControllerRevision"]
    return sorted(found, key=lambda obj: int(obj["revision"]))


def delete_records(cluster: FakeCluster, *, newest: int = 100) -> None:
    for record in records(cluster)[-newest:]:
        del cluster.objects["ControllerRevision", record["metadata"]["name"]]


def upgrade_condition(cluster: FakeCluster, service: SpeculativeService, plan_: Plan) -> tuple[str, str, str]:
    snapshot = make_snapshot(service, cluster.children(), config=cluster.config)
    conditions = compute_status(snapshot, plan_)["conditions"]
    (found,) = (c for c in conditions if c["type"] == "UpgradeAvailable")
    return found["status"], found["reason"], found["message"]
