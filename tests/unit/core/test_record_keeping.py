"""Which records of resolved revisions are made, renumbered and kept."""

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.names import Pool
from specserve_operator.core.records import HISTORY_LIMIT
from specserve_operator.render import render
from tests.unit.core.builders import (
    FakeCluster,
    deployments_of,
    disaggregated,
)
from tests.unit.core.pinned import DECODE_ARGS, delete_records, records, running, settle


def test_a_record_has_the_pod_templates_that_run_and_is_made_before_the_workloads() -> None:
    service = disaggregated()
    objects = render(FakeCluster().plan(service))
    kinds = [obj["kind"] for obj in objects]
    assert kinds.index("ControllerRevision") < kinds.index("Deployment")
    (record,) = (obj for obj in objects if obj["kind"] == "ControllerRevision")
    pools = record["data"]["pools"]
    for pool in Pool:
        (deployment,) = deployments_of(objects, pool)
        assert pools[pool]["template"] == deployment["spec"]["template"]
        assert pools[pool]["revision"] == deployment["metadata"]["labels"]["specserve.dev/revision"]
    assert record["metadata"]["ownerReferences"][0]["kind"] == "SpeculativeService"
    assert record["revision"] == 1


def test_nothing_new_is_recorded_while_nothing_changes() -> None:
    cluster = running(disaggregated())
    settle(cluster, disaggregated(decode={"replicas": 5}), version=2)
    assert [record["revision"] for record in records(cluster)] == [1]


def test_going_back_gives_the_old_record_a_new_number() -> None:
    cluster = running(disaggregated())
    (first,) = (record["metadata"]["name"] for record in records(cluster))
    settle(cluster, disaggregated(decode=DECODE_ARGS))
    settle(cluster, disaggregated())
    assert [record["revision"] for record in records(cluster)] == [2, 3]
    assert records(cluster)[-1]["metadata"]["name"] == first


def test_a_record_that_the_cluster_refuses_is_not_numbered_anew_with_every_try() -> None:
    cluster = FakeCluster()
    service = disaggregated()
    for _ in range(20):
        cluster.step(service)
        delete_records(cluster)
    numbers = {
        d["metadata"]["annotations"]["specserve.dev/record"] for d in deployments_of(cluster.children(), "decode")
    }
    assert numbers == {"1"}
    cluster.step(service)
    assert [record["revision"] for record in records(cluster)] == [1]


def test_only_the_last_records_are_kept() -> None:
    cluster = FakeCluster()
    for tokens in range(1, 16):
        settle(cluster, disaggregated(decode={"replicas": 1, "args": ["--max-num-seqs", str(tokens)]}))
    assert len(records(cluster)) == HISTORY_LIMIT
    assert records(cluster)[-1]["revision"] == 15


def test_the_record_of_pods_that_still_live_is_kept_however_old() -> None:
    cluster = running(disaggregated(decode={"replicas": 1}))
    first = records(cluster)[0]["metadata"]["name"]

    def broken(i: int) -> SpeculativeService:
        return disaggregated(decode={"replicas": 1, "args": ["--max-num-seqs", str(i)]})

    for i in range(1, 16):
        plan_ = cluster.plan(broken(i))
        decode = plan_.pool(Pool.DECODE)
        assert decode is not None
        for _ in range(3):
            cluster.step(broken(i), fails=decode.current.name)
    assert first in {record["metadata"]["name"] for record in records(cluster)}


def test_records_of_another_layout_are_left_alone() -> None:
    cluster = running(disaggregated())
    (record,) = records(cluster)
    foreign = {**record, "metadata": {**record["metadata"], "name": "coder-newer"}, "data": {"version": 99}}
    cluster.objects["ControllerRevision", "coder-newer"] = {**foreign, "revision": 100}
    for tokens in range(1, 14):
        settle(cluster, disaggregated(decode={"replicas": 1, "args": ["--max-num-seqs", str(tokens)]}))
    assert ("ControllerRevision", "coder-newer") in cluster.objects
