"""The status says what is there: readiness, progress, scaling, and times that move only on a flip."""

from datetime import timedelta
from typing import Any

import pytest

from specserve_operator.api.conditions import ConditionType
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import ApplyFailure, ObjectRef
from specserve_operator.core.plan import plan
from specserve_operator.core.status import compute_status
from specserve_operator.render import render
from tests.unit.core.builders import (
    DRAFT_MODEL,
    NOW,
    FakeCluster,
    decode_stats_of,
    deployments_of,
    disaggregated,
    iso,
    make_pod,
    make_service,
    make_snapshot,
    pods_of,
    ready_children,
    set_ready,
)
from tests.unit.core.statuses import condition, pool, status_of, verdict

# Readiness


def test_every_condition_is_there_from_the_first_pass() -> None:
    status = status_of({}, [])
    assert [c["type"] for c in status["conditions"]] == [str(t) for t in ConditionType]
    unknown = {c["type"] for c in status["conditions"] if c["status"] == "Unknown"}
    assert {"Ready", "GatewayReady", "PrefillReady", "DecodeReady", "KVTransferReady"} <= unknown
    assert verdict(status, "Ready") == ("Unknown", "Pending")
    assert verdict(status, "Progressing") == ("True", "RolloutInProgress")


def test_a_service_with_all_its_pods_is_ready() -> None:
    status = status_of({}, ready_children(disaggregated()))
    assert verdict(status, "Ready") == ("True", "AllPoolsReady")
    assert verdict(status, "Progressing") == ("False", "RolloutComplete")
    assert pool(status, "decode") | {"revision": ""} == {
        "name": "decode",
        "desired": 2,
        "replicas": 2,
        "ready": 2,
        "updated": 2,
        "revision": "",
        "reason": "PodsReady",
    }
    assert status["columns"]["decode"] == "2/2"
    assert status["endpoint"] == "http://coder-gateway.llm.svc"


def test_a_new_generation_is_not_ready_while_only_old_pods_serve() -> None:
    children = ready_children(disaggregated())
    status = status_of({"generation": 2, "model": {"uri": "file:///models/b"}}, children)
    assert status["observedGeneration"] == 2
    assert verdict(status, "Ready") == ("False", "RolloutInProgress")
    assert (pool(status, "decode")["ready"], pool(status, "decode")["updated"]) == (2, 0)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_service_is_ready_only_with_exactly_the_wanted_pods(replicas: int) -> None:
    children = ready_children(disaggregated(decode={"replicas": 2}))
    assert verdict(status_of({"decode": {"replicas": replicas}}, children), "Ready")[0] == "False"


def test_leftovers_of_evictions_do_not_count() -> None:
    children = ready_children(disaggregated())
    evicted = make_pod(deployments_of(children, "decode")[0], 9, ready=False)
    evicted["status"] |= {"phase": "Failed", "reason": "Evicted"}
    status = status_of({}, [*children, evicted])
    assert verdict(status, "Ready") == ("True", "AllPoolsReady")
    assert pool(status, "decode")["replicas"] == 2


def test_a_run_time_change_keeps_the_service_ready() -> None:
    children = ready_children(disaggregated())
    spec = {"generation": 2, "speculation": {"draft": DRAFT_MODEL, "mode": "Never"}}
    status = status_of(spec, children)
    assert verdict(status, "Ready") == ("True", "AllPoolsReady")
    assert verdict(status, "SpeculationEffective") == ("False", "ModeNever")


def test_one_gateway_pod_is_enough_for_the_gateway_but_not_for_the_service() -> None:
    children = ready_children(disaggregated(gateway={"replicas": 2}))
    set_ready(pods_of(children, "gateway")[0], False)
    status = status_of({"gateway": {"replicas": 2}}, children)
    assert verdict(status, "GatewayReady") == ("True", "PodsReady")
    assert verdict(status, "Ready") == ("False", "ModelLoading")


def test_the_reason_of_a_failing_pool_is_that_of_the_service() -> None:
    children = ready_children(disaggregated())
    pod = pods_of(children, "prefill")[0]
    set_ready(pod, False)
    pod["status"]["containerStatuses"][0] |= {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 1, "message": "error: --model: there is no folder /x"}},
    }
    status = status_of({}, children)
    assert verdict(status, "PrefillReady") == ("False", "ModelLoadFailed")
    assert verdict(status, "Ready") == ("False", "ModelLoadFailed")
    assert condition(status, "Ready")["message"] == "prefill: 0 of 1 pods are ready: --model: there is no folder /x"


@pytest.mark.parametrize(
    ("container", "reason", "message"),
    [
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "engine:9 not found"}}},
            "ImagePullFailed",
            "engine:9 not found",
        ),
        (
            {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 3}}},
            "CrashLooping",
            "exit code 3",
        ),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            },
            "OutOfMemory",
            "killed for want of memory",
        ),
    ],
)
def test_what_keeps_new_pods_from_serving_is_named_while_the_old_ones_serve(
    container: dict[str, Any], reason: str, message: str
) -> None:
    children = ready_children(disaggregated())
    spec = {"generation": 2, "decode": {"replicas": 2, "args": ["--max-num-seqs", "4"]}}
    new = next(d for d in deployments_of(render(plan(make_snapshot(disaggregated(**spec), children))), "decode"))
    pod = make_pod(new, ready=False, container={**container, "started": False, "restartCount": 5})
    status = status_of(spec, [*children, new, pod])
    assert verdict(status, "Ready") == ("False", reason)
    assert verdict(status, "DecodeReady") == ("False", reason)
    assert message in condition(status, "Ready")["message"]
    assert pool(status, "decode")["ready"] == 2


def test_a_quota_that_lets_no_new_pod_be_made_is_named_though_there_is_no_pod_to_look_at() -> None:
    children = ready_children(disaggregated())
    spec = {"generation": 2, "decode": {"replicas": 2, "args": ["--max-num-seqs", "4"]}}
    new = next(d for d in deployments_of(render(plan(make_snapshot(disaggregated(**spec), children))), "decode"))
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "message": "exceeded quota: gpus, requested: nvidia.com/gpu=1",
    }
    status = status_of(spec, [*children, {**new, "status": {"conditions": [failure]}}])
    assert status["observedGeneration"] == 2
    assert verdict(status, "Ready") == ("False", "InsufficientCapacity")
    assert "exceeded quota: gpus" in condition(status, "Ready")["message"]


def test_pods_that_no_node_takes_and_pods_that_do_not_get_ready_are_told_apart() -> None:
    children = ready_children(disaggregated())
    decode = pods_of(children, "decode")
    others = [c for c in children if c not in decode]
    (deployment,) = deployments_of(children, "decode")
    waiting = [make_pod(deployment, i, ready=False, unschedulable="0/3 nodes: Insufficient npu") for i in range(2)]
    starting = [make_pod(deployment, i, ready=False) for i in range(2)]
    assert verdict(status_of({}, [*others, *waiting]), "Ready") == ("False", "InsufficientCapacity")
    assert verdict(status_of({}, [*others, *starting]), "Ready") == ("False", "ModelLoading")


def test_a_pool_without_prefill_is_not_configured() -> None:
    children = ready_children(disaggregated(prefill=None))
    status = status_of({"prefill": None}, children)
    assert verdict(status, "PrefillReady") == ("True", "NotConfigured")
    assert verdict(status, "KVTransferReady") == ("True", "NotConfigured")
    assert verdict(status, "Ready") == ("True", "AllPoolsReady")
    assert "kvTransfer" not in status


def test_a_service_scaled_to_zero_serves_nobody() -> None:
    spec = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}
    status = status_of(spec, ready_children(disaggregated(**spec)))
    assert verdict(status, "Ready") == ("False", "ScaledToZero")
    assert verdict(status, "DecodeReady") == ("True", "ScaledToZero")


GATEWAY_SERVICE = ObjectRef("v1", "Service", "llm", "coder-gateway")


def test_a_refused_object_makes_a_service_unready_though_all_its_pods_run() -> None:
    failure = ApplyFailure(ObjectRef("v1", "ConfigMap", "llm", "coder-runtime"), "quota exceeded")
    status = status_of({}, ready_children(disaggregated()), failures=[failure])
    assert verdict(status, "Ready") == ("False", "ApplyFailed")
    assert condition(status, "Ready")["message"] == "ConfigMap coder-runtime: quota exceeded"
    assert verdict(status, "GatewayReady") == ("True", "PodsReady")


def test_a_refused_service_of_the_gateway_makes_the_gateway_unready_too() -> None:
    failures = [ApplyFailure(GATEWAY_SERVICE, "port 80 is taken")]
    for children in ([], ready_children(disaggregated())):
        status = status_of({}, children, failures=failures)
        assert verdict(status, "Ready") == ("False", "ApplyFailed")
        assert verdict(status, "GatewayReady") == ("False", "ApplyFailed")
        assert condition(status, "GatewayReady")["message"] == "Service coder-gateway: port 80 is taken"


def test_a_gateway_whose_port_nobody_listens_on_is_not_ready() -> None:
    children = ready_children(disaggregated())
    good = status_of({}, children)
    service = next(c for c in children if ObjectRef.of(c) == GATEWAY_SERVICE)
    service["status"] = {
        "conditions": [
            {"type": "Listening", "status": "False", "reason": "PortUnavailable", "message": "port 80 is taken"}
        ]
    }
    status = status_of({}, children, previous=good)
    assert verdict(status, "GatewayReady") == ("False", "PortUnavailable")
    assert verdict(status, "Ready") == ("False", "PortUnavailable")
    assert condition(status, "Ready")["message"] == "gateway: port 80 is taken"
    service["status"] = {}
    assert status_of({}, children, previous=status) == good


# Times and repetition


def test_nothing_changes_while_nothing_happens() -> None:
    children = ready_children(disaggregated())
    stats = [
        decode_stats_of(p, transfers=3, drafted=500, accepted=200, verified=100) for p in pods_of(children, "decode")
    ]
    first = status_of({}, children, stats=stats)
    later = status_of({}, children, previous=first, now=NOW + timedelta(hours=3), stats=stats)
    assert later == first


def test_the_transition_time_moves_only_when_the_status_flips() -> None:
    children = ready_children(disaggregated())
    first = status_of({}, children)
    set_ready(pods_of(children, "decode")[0], False)
    later = NOW + timedelta(minutes=5)
    second = status_of({}, children, previous=first, now=later)
    assert condition(second, "Ready")["lastTransitionTime"] == iso(later)
    assert condition(second, "PrefillReady")["lastTransitionTime"] == iso(NOW)
    set_ready(pods_of(children, "decode")[1], False)
    third = status_of({}, children, previous=second, now=later + timedelta(minutes=5))
    assert condition(third, "Ready")["message"] != condition(second, "Ready")["message"]
    assert condition(third, "Ready")["lastTransitionTime"] == iso(later)


def test_a_status_of_a_newer_operator_is_no_obstacle() -> None:
    newer = {
        "conditions": [{"type": "Ready", "status": "Perhaps", "reason": "Sunspots"}],
        "pools": None,
        "speculation": {"state": "Sometimes"},
    }
    status = status_of({}, ready_children(disaggregated()), previous=newer)
    assert verdict(status, "Ready") == ("True", "AllPoolsReady")


# Progress


def test_a_rollout_without_progress_stalls_and_moves_on_when_it_does() -> None:
    spec = {"rollout": {"progressDeadlineSeconds": 60}}
    cluster = FakeCluster()
    cluster.apply(plan(make_snapshot(disaggregated(**spec))))
    first = status_of(spec, cluster.children())
    assert verdict(first, "Progressing") == ("True", "RolloutInProgress")
    late = NOW + timedelta(seconds=61)
    stalled = status_of(spec, cluster.children(), previous=first, now=late)
    assert verdict(stalled, "Progressing") == ("False", "RolloutStalled")
    again = status_of(spec, cluster.children(), previous=stalled, now=late + timedelta(seconds=30))
    assert verdict(again, "Progressing") == ("False", "RolloutStalled")
    cluster.now = late + timedelta(seconds=40)
    set_ready(cluster.pods("prefill")[0], True, now=cluster.now)
    moving = status_of(spec, cluster.children(), previous=again, now=cluster.now)
    # The prefill pool moved; the decode pool has had no progress for longer than the deadline.
    assert verdict(moving, "Progressing") == ("False", "RolloutStalled")
    for pod in cluster.pods("decode") + cluster.pods("gateway"):
        set_ready(pod, True, now=cluster.now)
    done = status_of(spec, cluster.children(), previous=moving, now=cluster.now)
    assert verdict(done, "Progressing") == ("False", "RolloutComplete")


def test_a_pod_that_fails_after_the_rollout_is_no_rollout() -> None:
    children = ready_children(disaggregated())
    first = status_of({}, children)
    set_ready(pods_of(children, "decode")[0], False)
    second = status_of({}, children, previous=first, now=NOW + timedelta(days=1))
    assert verdict(second, "Progressing") == ("False", "RolloutComplete")
    assert verdict(second, "Ready")[0] == "False"


def test_going_back_to_an_old_revision_starts_the_deadline_anew() -> None:
    """Its workload may be older than the deadline."""
    spec = {"rollout": {"progressDeadlineSeconds": 60}}
    children = ready_children(disaggregated())
    done = status_of(spec, children)
    started = NOW + timedelta(hours=1)
    to_b = status_of({**spec, "model": {"uri": "file:///models/b"}}, children, previous=done, now=started)
    assert verdict(to_b, "Progressing") == ("True", "RolloutInProgress")
    later = started + timedelta(seconds=30)
    back = status_of({**spec, "decode": {"replicas": 3}}, children, previous=to_b, now=later)
    assert verdict(back, "Progressing") == ("True", "RolloutInProgress")
    stuck = status_of({**spec, "decode": {"replicas": 3}}, children, previous=back, now=started + timedelta(hours=1))
    assert verdict(stuck, "Progressing") == ("False", "RolloutStalled")


# Scaling, endpoint


def test_a_change_of_size_is_kept_in_the_history_newest_first() -> None:
    first = status_of({}, ready_children(disaggregated()))
    assert first["scalingHistory"] == []
    second = status_of({"decode": {"replicas": 3}}, ready_children(disaggregated()), previous=first)
    third = status_of(
        {"decode": {"replicas": 5}}, ready_children(disaggregated()), previous=second, now=NOW + timedelta(hours=1)
    )
    steps = [(d["fromReplicas"], d["toReplicas"], d["reason"]) for d in third["scalingHistory"]]
    assert steps == [(3, 5, "SpecChanged"), (2, 3, "SpecChanged")]
    assert third["scalingHistory"][1] == second["scalingHistory"][0]


def test_decisions_that_another_version_has_written_are_left_out() -> None:
    first = status_of({}, ready_children(disaggregated()))
    second = status_of({"decode": {"replicas": 3}}, ready_children(disaggregated()), previous=first)
    (known,) = second["scalingHistory"]
    history = [{**known, "reason": "Sunspots"}, known, "text", {"pool": "decode"}]
    third = status_of({"decode": {"replicas": 3}}, [], previous={**second, "scalingHistory": history})
    assert third["scalingHistory"] == [known]


def test_on_one_machine_the_endpoint_is_this_machine() -> None:
    service = make_service(gateway={"port": 8080})
    snapshot = make_snapshot(service, config=OperatorConfig("e", "g", "1", local=True))
    assert compute_status(snapshot, plan(snapshot))["endpoint"] == "http://127.0.0.1:8080"
