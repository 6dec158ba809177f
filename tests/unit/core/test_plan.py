"""What is planned from what is there: replicas, revisions kept, things removed."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.constants import ANNOTATION_POOL_REPLICAS
from specserve_operator.core.names import Pool
from specserve_operator.core.objects import Manifest, ObjectRef
from specserve_operator.core.pinning import resolve
from specserve_operator.core.plan import Plan, plan, plan_rollouts
from specserve_operator.render import render
from tests.unit.core.builders import (
    DRAFT_MODEL,
    FakeCluster,
    deployments_of,
    disaggregated,
    make_service,
    make_snapshot,
    pods_of,
    ready_children,
)

TARGET_B = {"uri": "file:///models/target-b"}


def replicas(plan_: Plan, pool: Pool) -> int:
    found = plan_.pool(pool)
    assert found is not None
    return found.current.replicas


def decided_replicas(service: SpeculativeService, children: list[Manifest]) -> int:
    """Of the decode pool, also for bounds that `plan` refuses as not built yet."""
    snapshot = make_snapshot(service, children)
    pools = plan_rollouts(snapshot, resolve(snapshot))
    return next(p.desired for p in pools if p.pool is Pool.DECODE)


def settle(cluster: FakeCluster, service: SpeculativeService, *, steps: int = 60) -> int:
    """Steps until nothing changes; returns how many it took."""
    for count in range(steps):
        before = cluster.children()
        cluster.step(service)
        if cluster.children() == before:
            return count
    pytest.fail("the cluster does not come to rest")


def names(children: list[Manifest], kind: str) -> set[str]:
    return {c["metadata"]["name"] for c in children if c["kind"] == kind}


# Replicas


def test_a_pool_without_replicas_or_scaling_gets_one() -> None:
    assert replicas(plan(make_snapshot(make_service())), Pool.DECODE) == 1


def test_a_service_without_prefill_has_no_prefill_pool_and_no_peers() -> None:
    result = plan(make_snapshot(make_service(decode={"replicas": 2})))
    assert [p.pool for p in result.pools] == [Pool.DECODE, Pool.GATEWAY]
    assert not any("prefill" in o["metadata"]["name"] for o in render(result))


@pytest.mark.parametrize("mode", ["Auto", "Advise", "External"])
def test_a_new_scaled_pool_starts_with_its_minimum(mode: str) -> None:
    service = make_service(decode={"scaling": {"mode": mode, "minReplicas": 2, "maxReplicas": 5}})
    assert decided_replicas(service, []) == 2


@pytest.mark.parametrize("mode", ["Auto", "Advise", "External"])
def test_a_pool_whose_bounds_are_one_number_has_that_size(mode: str) -> None:
    children = ready_children(make_service(decode={"replicas": 9}))
    service = make_service(decode={"scaling": {"mode": mode, "minReplicas": 3, "maxReplicas": 3}})
    result = plan(make_snapshot(service, children))
    assert (result.problems, replicas(result, Pool.DECODE)) == ((), 3)


@pytest.mark.parametrize(("mode", "expected"), [("Auto", 4), ("Advise", 9), ("External", 4)])
def test_only_advice_leaves_a_live_pool_outside_its_bounds(mode: str, expected: int) -> None:
    children = ready_children(make_service(decode={"replicas": 9}))
    service = make_service(decode={"scaling": {"mode": mode, "maxReplicas": 4}})
    assert decided_replicas(service, children) == expected


def test_the_surge_of_a_rollout_is_not_taken_for_the_size_of_a_scaled_pool() -> None:
    scaling = {"scaling": {"mode": "Advise", "minReplicas": 1, "maxReplicas": 9}}
    cluster = FakeCluster()
    settle(cluster, make_service(decode={"replicas": 3}))
    service_b = make_service(decode={"replicas": 3}, model=TARGET_B)
    for _ in range(3):
        cluster.step(service_b)
        assert decided_replicas(make_service(decode=scaling), cluster.children()) == 3
    settle(cluster, service_b)
    assert len(cluster.pods("decode")) == 3


def test_the_current_workload_knows_the_size_better_than_a_newer_one_that_is_given_up() -> None:
    scaling = {"scaling": {"mode": "Advise", "maxReplicas": 9}}
    cluster = FakeCluster()
    settle(cluster, make_service())
    cluster.step(make_service(model=TARGET_B))
    children = cluster.children()
    old, new = sorted(deployments_of(children, "decode"), key=lambda d: d["metadata"]["creationTimestamp"])
    old["metadata"]["annotations"][ANNOTATION_POOL_REPLICAS] = "4"
    assert new["metadata"]["annotations"][ANNOTATION_POOL_REPLICAS] == "1"
    assert decided_replicas(make_service(decode=scaling), children) == 4


def test_a_workload_whose_annotation_was_lost_still_keeps_its_size() -> None:
    children = ready_children(make_service(decode={"replicas": 3}))
    for deployment in deployments_of(children, "decode"):
        del deployment["metadata"]["annotations"][ANNOTATION_POOL_REPLICAS]
    service = make_service(decode={"scaling": {"mode": "Advise", "maxReplicas": 9}})
    assert decided_replicas(service, children) == 3


def test_serving_pools_scaled_to_zero_keep_their_workloads() -> None:
    cluster = FakeCluster()
    settle(cluster, disaggregated())
    service = disaggregated(prefill={"replicas": 0}, decode={"replicas": 0})
    settle(cluster, service)
    assert cluster.pods("decode") == []
    assert len(deployments_of(cluster.children(), "decode")) == 1
    assert len(cluster.pods("gateway")) == 1


# Draft length


def decode_flag(plan_: Plan) -> str:
    (deployment,) = (o for o in render(plan_) if o["kind"] == "Deployment" and "-decode-" in o["metadata"]["name"])
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return str(args[args.index("--max-draft-tokens") + 1])


def with_max(tokens: int, **spec: Any) -> SpeculativeService:
    return disaggregated(speculation={"draft": DRAFT_MODEL, "length": {"max": tokens}}, **spec)


def test_a_lower_draft_maximum_restarts_nothing() -> None:
    children = ready_children(with_max(8))
    before = plan(make_snapshot(with_max(8), children))
    after = plan(make_snapshot(with_max(3), children))
    assert [p.current.revision for p in after.pools] == [p.current.revision for p in before.pools]
    assert decode_flag(after) == "8"
    assert after.runtime_state.max_tokens == 3


def test_a_higher_draft_maximum_rolls_the_decode_pods() -> None:
    children = ready_children(with_max(8))
    result = plan(make_snapshot(with_max(16), children))
    decode = result.pool(Pool.DECODE)
    assert decode is not None
    assert [o.live_replicas for o in decode.old] == [2]
    assert decode.current.resolved.max_draft_tokens == 16


def test_another_change_takes_the_lower_draft_maximum_along() -> None:
    children = ready_children(with_max(8))
    result = plan(make_snapshot(with_max(3, model=TARGET_B), children))
    decode = result.pool(Pool.DECODE)
    assert decode is not None
    assert decode.current.resolved.max_draft_tokens == 3


def test_going_back_to_a_lower_maximum_during_the_rollout_does_not_turn_it_around() -> None:
    cluster = FakeCluster()
    settle(cluster, with_max(8, decode={"replicas": 4}))
    for _ in range(4):
        cluster.step(with_max(16, decode={"replicas": 4}))
    sizes = {d["metadata"]["name"]: d["spec"]["replicas"] for d in deployments_of(cluster.children(), "decode")}
    largest = max(sizes, key=lambda name: sizes[name])
    settle(cluster, with_max(8, decode={"replicas": 4}))
    assert names(deployments_of(cluster.children(), "decode"), "Deployment") == {largest}


# Rollouts of the whole service


def test_a_change_of_the_target_ends_with_new_pods_only_and_no_old_object() -> None:
    cluster = FakeCluster()
    settle(cluster, disaggregated())
    old = names(cluster.children(), "Deployment") | names(cluster.children(), "Service")
    settle(cluster, disaggregated(model=TARGET_B))
    left = names(cluster.children(), "Deployment") | names(cluster.children(), "Service")
    assert {n for n in old & left if "gateway" not in n} == set()
    assert len(cluster.pods("decode")) == 2
    assert len(cluster.pods("prefill")) == 1


def test_a_to_b_to_a_ends_with_a() -> None:
    a, b = disaggregated(decode={"replicas": 3}), disaggregated(decode={"replicas": 3}, model=TARGET_B)
    cluster = FakeCluster()
    settle(cluster, a)
    at_rest = names(cluster.children(), "Deployment")
    for _ in range(3):
        cluster.step(b)
    assert names(cluster.children(), "Deployment") != at_rest
    settle(cluster, a)
    assert names(cluster.children(), "Deployment") == at_rest
    assert len(cluster.pods("decode")) == 3


def test_a_broken_revision_leaves_the_old_pods_serving() -> None:
    cluster = FakeCluster()
    settle(cluster, disaggregated())
    service_b = disaggregated(model=TARGET_B)
    pools = {p.pool: p.current.name for p in plan(make_snapshot(service_b)).pools}
    for _ in range(30):
        cluster.step(service_b, fails=pools[Pool.PREFILL])
    decode = {p["metadata"]["name"].rpartition("-")[0] for p in cluster.pods("decode")}
    assert pools[Pool.DECODE] not in decode, "decode must not run ahead of a prefill pool that never gets ready"
    assert len(cluster.pods("decode")) == 2
    assert len(cluster.pods("prefill")) == 2  # the old one and the failing one


@settings(max_examples=25, deadline=None)
@given(
    targets=st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5),
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    surge=st.integers(0, 2),
    steps=st.integers(1, 4),
)
def test_any_sequence_of_targets_ends_with_the_last_one_and_never_goes_below_the_floor(
    *, targets: list[str], prefill: int, decode: int, surge: int, steps: int
) -> None:
    unavailable = 0 if surge else 1

    def service(target: str) -> SpeculativeService:
        return disaggregated(
            model={"uri": f"file:///models/{target}"},
            prefill={"replicas": prefill},
            decode={"replicas": decode},
            rollout={"maxSurge": surge, "maxUnavailable": unavailable},
        )

    cluster = FakeCluster()
    settle(cluster, service(targets[0]))
    for target in targets:
        for _ in range(steps):
            cluster.step(service(target))
            assert len(cluster.pods("decode")) >= decode - unavailable
            assert len(cluster.pods("decode")) <= decode + surge
    settle(cluster, service(targets[-1]))
    wanted = {p.current.name for p in plan(make_snapshot(service(targets[-1]))).pools}
    assert names(cluster.children(), "Deployment") == wanted
    assert (len(cluster.pods("prefill")), len(cluster.pods("decode"))) == (prefill, decode)


def test_a_plan_at_rest_changes_nothing() -> None:
    cluster = FakeCluster()
    service = disaggregated()
    settle(cluster, service)
    before = cluster.children()
    result = plan(make_snapshot(service, before, now=cluster.now))
    assert result.deletions == ()
    assert result.requeue_after_seconds is None
    live = {(o["kind"], o["metadata"]["name"]): o for o in before if o["kind"] != "Pod"}
    for obj in render(result):
        found = live[obj["kind"], obj["metadata"]["name"]]
        found["metadata"].pop("creationTimestamp", None)
        assert obj == found


def test_a_running_rollout_is_looked_at_when_its_deadline_has_passed() -> None:
    service = disaggregated(rollout={"progressDeadlineSeconds": 100})
    cluster = FakeCluster()
    cluster.apply(plan(make_snapshot(service)))
    result = plan(make_snapshot(service, cluster.children()))
    assert result.requeue_after_seconds == 101


# Deletions


def test_a_pool_that_left_the_spec_is_removed_with_its_service() -> None:
    children = ready_children(disaggregated())
    service = disaggregated(prefill=None)
    deleted = {(r.kind, r.name.rpartition("-")[0]) for r in plan(make_snapshot(service, children)).deletions}
    assert ("Deployment", "coder-prefill") in deleted
    assert ("Service", "coder-prefill") in deleted


def test_an_old_revision_is_removed_only_when_its_pods_are_gone() -> None:
    cluster = FakeCluster()
    settle(cluster, disaggregated())
    children = cluster.children()
    service_b = disaggregated(model=TARGET_B)
    assert plan(make_snapshot(service_b, children)).deletions == ()
    for deployment in deployments_of(children, "decode"):
        deployment["spec"]["replicas"] = 0
    still_there = plan(make_snapshot(service_b, children)).deletions
    assert not any("decode" in r.name for r in still_there)
    without_pods = [c for c in children if c["kind"] != "Pod"]
    assert any("decode" in r.name for r in plan(make_snapshot(service_b, without_pods)).deletions)


def test_leftovers_of_evictions_neither_keep_an_old_revision_nor_count_as_its_pods() -> None:
    children = ready_children(disaggregated())
    for deployment in deployments_of(children, "decode"):
        deployment["spec"]["replicas"] = 0
    for pod in pods_of(children, "decode"):
        pod["status"] |= {"phase": "Failed", "conditions": []}
    deleted = plan(make_snapshot(disaggregated(model=TARGET_B), children)).deletions
    assert any("decode" in r.name for r in deleted)


def test_a_disruption_budget_goes_when_the_pool_shrinks_to_one() -> None:
    children = ready_children(disaggregated(decode={"replicas": 2}))
    result = plan(make_snapshot(disaggregated(decode={"replicas": 1}), children))
    assert ObjectRef("policy/v1", "PodDisruptionBudget", "llm", "coder-decode") in result.deletions


def test_several_gateways_have_a_disruption_budget() -> None:
    children = ready_children(disaggregated(gateway={"replicas": 3}))
    budget = ObjectRef("policy/v1", "PodDisruptionBudget", "llm", "coder-gateway")
    assert budget in [ObjectRef.of(child) for child in children]
    assert budget in plan(make_snapshot(disaggregated(gateway={"replicas": 1}), children)).deletions


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_copy_of_a_workload_is_left_alone_and_counts_for_nothing(replicas: int) -> None:
    """Somebody tries something on a copy with all labels."""
    children = ready_children(disaggregated())
    copied = copy.deepcopy(deployments_of(children, "decode")[0])
    copied["metadata"] |= {"name": "debug"}
    del copied["metadata"]["ownerReferences"]
    copied["spec"]["replicas"] = replicas
    assert plan(make_snapshot(disaggregated(), [*children, copied])) == plan(make_snapshot(disaggregated(), children))


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget", "Service", "PoolScaler"])
def test_a_copy_of_another_object_is_left_alone(kind: str) -> None:
    labels = {
        "app.kubernetes.io/managed-by": "specserve",
        "specserve.dev/service": "coder",
        "specserve.dev/pool": "training",
        "specserve.dev/target-revision": "old",
    }
    copied = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "mine", "namespace": "llm", "labels": labels}}
    assert plan(make_snapshot(disaggregated(), [*ready_children(disaggregated()), copied])).deletions == ()


def test_foreign_objects_and_unknown_kinds_are_left_alone() -> None:
    children = ready_children(disaggregated())
    labels = {"specserve.dev/service": "coder", "specserve.dev/pool": "prefill"}
    ours = {**labels, "app.kubernetes.io/managed-by": "specserve"}
    foreign = [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "x", "namespace": "llm", "labels": labels},
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "y", "namespace": "llm", "labels": ours}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "memory", "namespace": "llm", "labels": ours}},
    ]
    deleted = {r.name for r in plan(make_snapshot(disaggregated(prefill=None), [*children, *foreign])).deletions}
    assert deleted & {"x", "y", "memory"} == set()
