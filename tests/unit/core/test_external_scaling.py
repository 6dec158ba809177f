"""In mode External the number of pods is what the PoolScaler says; the operator only makes a start."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.api.status import PoolScalerStatus
from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.names import Pool
from specserve_operator.core.objects import ObjectRef
from specserve_operator.core.scalers import compute_scaler_statuses
from specserve_operator.core.status import compute_status
from specserve_operator.render import render, render_seeds
from tests.unit.core.builders import FakeCluster, disaggregated, make_snapshot

SCALER = ("PoolScaler", "coder-decode")
REF = ObjectRef("specserve.dev/v1alpha1", "PoolScaler", "llm", "coder-decode")


def external(least: int = 1, most: int = 5, **spec: Any) -> SpeculativeService:
    scaling = {"mode": "External", "minReplicas": least, "maxReplicas": most}
    return disaggregated(**{"decode": {"scaling": scaling}, **spec})


def settle(cluster: FakeCluster, service: SpeculativeService) -> FakeCluster:
    for _ in range(20):
        cluster.step(service)
    return cluster


def running(service: SpeculativeService) -> FakeCluster:
    return settle(FakeCluster(), service)


def write_scale(cluster: FakeCluster, replicas: int) -> None:
    """As an HPA does."""
    cluster.objects[SCALER] = {**cluster.objects[SCALER], "spec": {"replicas": replicas}}


def scaler_status(cluster: FakeCluster, service: SpeculativeService) -> dict[str, Any]:
    snapshot = make_snapshot(service, cluster.children(), config=cluster.config)
    status = compute_scaler_statuses(snapshot, cluster.plan(service))[REF]
    validated = PoolScalerStatus.model_validate(status).to_manifest()
    assert {name: validated[name] for name in status} == status
    return status


def test_a_new_pool_has_its_minimum_and_a_scaler_that_says_so() -> None:
    cluster = running(external(2, 5))
    assert len(cluster.pods("decode")) == 2
    assert cluster.objects[SCALER]["spec"] == {"replicas": 2}


@pytest.mark.parametrize(("asked", "expected"), [(3, 3), (0, 1), (9, 5)])
def test_the_pool_has_what_its_scaler_asks_for_within_the_bounds(asked: int, expected: int) -> None:
    cluster = running(external())
    write_scale(cluster, asked)
    settle(cluster, external())
    assert len(cluster.pods("decode")) == expected
    assert cluster.objects[SCALER]["spec"] == {"replicas": asked}, "that number is not the operator's"


def test_applying_the_service_again_does_not_reset_a_scaled_pool() -> None:
    cluster = running(external())
    write_scale(cluster, 4)
    settle(cluster, external())
    settle(cluster, external(generation=2, gateway={"replicas": 2}))
    assert len(cluster.pods("decode")) == 4


def test_switching_external_scaling_on_starts_with_the_live_size() -> None:
    cluster = running(disaggregated(decode={"replicas": 4}))
    settle(cluster, external())
    assert cluster.objects[SCALER]["spec"] == {"replicas": 4}
    assert len(cluster.pods("decode")) == 4


def test_switching_it_on_in_the_middle_of_a_rollout_does_not_take_the_surge_for_the_size() -> None:
    cluster = running(disaggregated(decode={"replicas": 3}))
    model = {"uri": "file:///models/b"}
    for _ in range(3):
        cluster.step(disaggregated(decode={"replicas": 3}, model=model))
    settle(cluster, external(model=model))
    assert cluster.objects[SCALER]["spec"] == {"replicas": 3}
    assert len(cluster.pods("decode")) == 3


def test_a_scaler_that_was_deleted_is_made_again_with_the_live_size() -> None:
    cluster = running(external())
    write_scale(cluster, 4)
    settle(cluster, external())
    del cluster.objects[SCALER]
    settle(cluster, external())
    assert cluster.objects[SCALER]["spec"] == {"replicas": 4}
    assert len(cluster.pods("decode")) == 4


def test_a_scaler_goes_with_its_mode_and_the_spec_decides_again() -> None:
    cluster = running(external())
    write_scale(cluster, 4)
    settle(cluster, external())
    settle(cluster, disaggregated(decode={"replicas": 2}))
    assert SCALER not in cluster.objects
    assert len(cluster.pods("decode")) == 2


def test_bounds_that_leave_one_size_keep_the_scaler_that_an_autoscaler_may_refer_to() -> None:
    cluster = running(external())
    settle(cluster, external(3, 3))
    assert SCALER in cluster.objects
    assert len(cluster.pods("decode")) == 3


def test_only_the_seed_has_replicas_and_only_for_a_scaler_that_is_missing() -> None:
    cluster = FakeCluster()
    first = cluster.plan(external(2, 5))
    assert render_seeds(first) == [
        {
            "apiVersion": "specserve.dev/v1alpha1",
            "kind": "PoolScaler",
            "metadata": {"name": "coder-decode", "namespace": "llm"},
            "spec": {"replicas": 2},
        }
    ]
    (ours,) = (obj for obj in render(first) if obj["kind"] == "PoolScaler")
    assert "spec" not in ours
    assert ours["metadata"]["labels"]["specserve.dev/pool"] == "decode"
    cluster.apply(first)
    assert render_seeds(cluster.plan(external(2, 5))) == []


def test_each_external_pool_has_a_scaler_of_its_own() -> None:
    scaling = {"scaling": {"mode": "External", "maxReplicas": 3}}
    cluster = running(disaggregated(prefill=scaling, decode=scaling))
    assert {name for kind, name in cluster.objects if kind == "PoolScaler"} == {"coder-prefill", "coder-decode"}
    assert not any(kind == "PoolScaler" for kind, _ in running(disaggregated()).objects)


def test_the_status_of_a_scaler_is_complete_before_its_first_use() -> None:
    cluster = FakeCluster()
    cluster.apply(cluster.plan(external(2, 5)))
    assert scaler_status(FakeCluster(), external(2, 5)) == {
        "observedGeneration": 1,
        "replicas": 0,
        "selector": "specserve.dev/pool=decode,specserve.dev/service=coder",
        "desiredReplicas": 2,
        "reason": "ExternallyScaled",
    }


@pytest.mark.parametrize(("asked", "desired", "reason"), [(0, 1, "MinReplicasReached"), (9, 5, "MaxReplicasReached")])
def test_the_status_of_a_scaler_names_the_bound_that_holds_the_pool(asked: int, desired: int, reason: str) -> None:
    cluster = running(external())
    write_scale(cluster, asked)
    status = scaler_status(settle(cluster, external()), external())
    assert (status["replicas"], status["desiredReplicas"], status["reason"]) == (desired, desired, reason)


def test_the_selector_of_a_scaler_finds_pods_of_all_revisions_of_its_pool_only() -> None:
    cluster = running(external(3, 5))
    selector = dict(pair.split("=") for pair in scaler_status(cluster, external(3, 5))["selector"].split(","))
    for _ in range(3):
        cluster.step(external(3, 5, model={"uri": "file:///models/b"}))
    pods = [c for c in cluster.children() if c["kind"] == "Pod"]
    found = [p for p in pods if selector.items() <= p["metadata"]["labels"].items()]
    assert found == cluster.pods("decode")
    assert len({p["metadata"]["labels"]["specserve.dev/revision"] for p in found}) == 2


def test_a_status_that_is_right_is_not_written_again() -> None:
    cluster = running(external())
    cluster.objects[SCALER]["status"] = scaler_status(cluster, external())
    snapshot = make_snapshot(external(), cluster.children())
    assert compute_scaler_statuses(snapshot, cluster.plan(external())) == {}


def test_the_history_of_the_service_says_who_scaled() -> None:
    cluster = running(external())
    first = compute_status(make_snapshot(external(), cluster.children()), cluster.plan(external()))
    write_scale(cluster, 9)
    service = external(status=first)
    status = compute_status(make_snapshot(service, cluster.children()), cluster.plan(service))
    (decision,) = status["scalingHistory"]
    assert (decision["fromReplicas"], decision["toReplicas"]) == (1, 5)
    assert (decision["reason"], decision["message"]) == (
        "MaxReplicasReached",
        "PoolScaler coder-decode asks for 9",
    )


def test_a_service_whose_pool_is_scaled_by_others_can_be_served() -> None:
    assert FakeCluster().plan(external()).problems == ()


@settings(max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("scale"), st.integers(0, 9)),
            st.tuples(st.just("target"), st.sampled_from("ab")),
            st.tuples(st.just("delete scaler"), st.none()),
            st.tuples(st.just("delete records"), st.none()),
            st.tuples(st.just("step"), st.integers(1, 3)),
        ),
        max_size=10,
    )
)
def test_whatever_happens_the_operator_never_changes_the_number_that_others_wrote(
    events: list[tuple[str, Any]],
) -> None:
    cluster, target = running(external()), "target"
    written = 1
    for event, value in events:
        match event:
            case "scale":
                write_scale(cluster, value)
                written = value
            case "target":
                target = value
            case "delete scaler":
                del cluster.objects[SCALER]
            case "delete records":
                for key in [key for key in cluster.objects if key[0] == "ControllerRevision"]:
                    del cluster.objects[key]
        decided = cluster.plan(external(model={"uri": f"file:///models/{target}"})).pool(Pool.DECODE)
        for _ in range(value if event == "step" else 1):
            cluster.step(external(model={"uri": f"file:///models/{target}"}))
        if event == "delete scaler":
            assert decided is not None
            written = decided.desired
        assert cluster.objects[SCALER]["spec"]["replicas"] == written
    settle(cluster, external(model={"uri": f"file:///models/{target}"}))
    assert len(cluster.pods("decode")) == min(max(written, 1), 5)
