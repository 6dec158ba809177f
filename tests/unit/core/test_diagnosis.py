"""Why a pod does not serve, from what a cluster says about it."""

from typing import Any

import pytest

from specserve_operator.api.conditions import Reason
from specserve_operator.core.diagnosis import diagnose_pod, diagnose_pool
from specserve_operator.core.snapshot import PodView
from tests.unit.core.builders import deployments_of, make_pod, make_service, make_snapshot, ready_children

SERVICE = make_service()
DEPLOYMENT = deployments_of(ready_children(SERVICE), "decode")[0]


def view(**pod: Any) -> PodView:
    (found,) = make_snapshot(SERVICE, [make_pod(DEPLOYMENT, **{"ready": False, **pod})]).pods
    return found


def ended(message: str, *, code: int = 1, reason: str = "Error", waiting: str = "CrashLoopBackOff") -> dict[str, Any]:
    return {
        "state": {"waiting": {"reason": waiting, "message": "back-off 10s"}},
        "lastState": {"terminated": {"exitCode": code, "reason": reason, "message": message}},
        "restartCount": 3,
        "started": False,
    }


@pytest.mark.parametrize(
    ("container", "reason", "message"),
    [
        ({}, Reason.MODEL_LOADING, "container engine is running and not ready yet"),
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
            Reason.IMAGE_PULL_FAILED,
            "no such image",
        ),
        (
            {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}}},
            Reason.PODS_NOT_READY,
            'CreateContainerConfigError: secret "hub" not found',
        ),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, Reason.PODS_NOT_READY, "a pod is being started"),
        (
            ended("Traceback ...\nRuntimeError: boom\n"),
            Reason.CRASH_LOOPING,
            "container engine ended with exit code 1: RuntimeError: boom",
        ),
        (
            ended("", code=137, reason="OOMKilled"),
            Reason.OUT_OF_MEMORY,
            "container engine was killed for want of memory",
        ),
        (
            ended("loading\nerror: --model: there is no folder /models/target\n"),
            Reason.MODEL_LOAD_FAILED,
            "--model: there is no folder /models/target",
        ),
        (
            ended("error: --draft-model: TokenizerMismatch: vocab_size is 3, that of the target (--model) 4\n"),
            Reason.TOKENIZER_MISMATCH,
            "--draft-model: TokenizerMismatch: vocab_size is 3, that of the target (--model) 4",
        ),
        (
            ended("error: HooksNotInstalled: no V1 runner"),
            Reason.HOOKS_NOT_INSTALLED,
            "HooksNotInstalled: no V1 runner",
        ),
        (ended("error: --kv-port: port 9100 is in use"), Reason.CRASH_LOOPING, "--kv-port: port 9100 is in use"),
    ],
)
def test_a_container_says_why_it_does_not_serve(container: dict[str, Any], reason: Reason, message: str) -> None:
    finding = diagnose_pod(view(container=container))
    assert finding is not None
    assert (finding.reason, finding.message) == (reason, message)


def test_a_pod_that_was_killed_once_is_starting_and_one_that_was_killed_twice_loops() -> None:
    running = {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137, "reason": "Error"}}}
    once = diagnose_pod(view(container={**running, "restartCount": 1}))
    twice = diagnose_pod(view(container={**running, "restartCount": 2}))
    assert once is not None
    assert twice is not None
    assert (once.reason, once.message) == (
        Reason.MODEL_LOADING,
        "container engine ended with exit code 137 and is starting again",
    )
    assert twice.reason is Reason.CRASH_LOOPING


def test_a_pod_without_a_node_lacks_capacity() -> None:
    finding = diagnose_pod(view(unschedulable="0/3 nodes are available: insufficient nvidia.com/gpu"))
    assert finding is not None
    assert finding.reason is Reason.INSUFFICIENT_CAPACITY
    assert "nvidia.com/gpu" in finding.message


def test_pods_that_serve_or_are_leaving_are_not_diagnosed() -> None:
    assert diagnose_pod(view(ready=True)) is None
    assert diagnose_pod(view(deleting=True)) is None


def test_the_most_urgent_finding_of_a_pool_is_reported() -> None:
    pods = [view(), view(unschedulable="no node"), view(container=ended("error: --model: no folder"))]
    finding = diagnose_pool([], pods)
    assert finding is not None
    assert finding.reason is Reason.MODEL_LOAD_FAILED


def test_a_quota_that_refuses_pods_is_want_of_capacity() -> None:
    failing = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    deployment = {**DEPLOYMENT, "status": {"conditions": [failing]}}
    finding = diagnose_pool(make_snapshot(SERVICE, [deployment]).workloads, [])
    assert finding is not None
    assert (finding.reason, finding.message) == (Reason.INSUFFICIENT_CAPACITY, "exceeded quota: gpus")


def test_long_messages_are_cut() -> None:
    finding = diagnose_pod(view(container=ended("x" * 5000)))
    assert finding is not None
    assert len(finding.message) == 400
