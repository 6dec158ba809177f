"""Pod status as the kubelet writes it."""

from typing import Any

import pytest

from specserve_operator.cluster.local.podstatus import (
    ContainerRecord,
    ContainerState,
    Running,
    Terminated,
    Waiting,
    is_ready,
    phase,
    render_pod_status,
    termination_reason,
)

STARTED, NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z", "2026-01-01T00:02:00Z"
FAILED = Terminated(137, "OOMKilled", "last words", STARTED, NOW, signal=9)
DONE = Terminated(0, "Completed", "", STARTED, NOW)


def record(state: ContainerState, **fields: Any) -> ContainerRecord:
    return ContainerRecord("engine", "image", state, **fields)


def status_of(
    *containers: ContainerRecord, init: tuple[ContainerRecord, ...] = (), now: str = NOW, previous: Any = None
) -> dict[str, Any]:
    return render_pod_status(
        containers, init, pod_ip="127.77.0.5", started_at=STARTED, now=now, previous=previous or {}
    )


def condition(status: dict[str, Any], type_: str) -> dict[str, Any]:
    return next(c for c in status["conditions"] if c["type"] == type_)


def test_running_and_ready_pod() -> None:
    status = status_of(record(Running(STARTED), started=True, ready=True))
    assert status["phase"] == "Running"
    assert is_ready({"status": status})
    assert status["podIP"] == "127.77.0.5"
    assert status["containerStatuses"] == [
        {
            "name": "engine",
            "image": "image",
            "imageID": "",
            "state": {"running": {"startedAt": STARTED}},
            "lastState": {},
            "restartCount": 0,
            "started": True,
            "ready": True,
        }
    ]


def test_crashing_container_shows_why_it_waits_and_how_it_ended() -> None:
    crashing = record(Waiting("CrashLoopBackOff", "back-off 2s"), last=FAILED, restart_count=3)
    status = status_of(crashing)
    container = status["containerStatuses"][0]
    assert container["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 2s"}}
    assert container["lastState"]["terminated"] == {
        "exitCode": 137,
        "signal": 9,
        "reason": "OOMKilled",
        "message": "last words",
        "startedAt": STARTED,
        "finishedAt": NOW,
    }
    assert container["restartCount"] == 3
    assert status["phase"] == "Running"
    assert condition(status, "Ready")["reason"] == "ContainersNotReady"
    assert condition(status, "Ready")["message"] == "containers with unready status: [engine]"


def test_transition_time_changes_with_the_condition_only() -> None:
    first = status_of(record(Running(STARTED)))
    same = status_of(record(Running(STARTED)), now=LATER, previous=first)
    assert condition(same, "Ready")["lastTransitionTime"] == NOW
    ready = status_of(record(Running(STARTED), ready=True), now=LATER, previous=same)
    assert condition(ready, "Ready")["lastTransitionTime"] == LATER
    assert condition(ready, "PodScheduled")["lastTransitionTime"] == NOW


def test_pod_is_pending_until_its_init_containers_are_through() -> None:
    waiting = record(Waiting("PodInitializing"))
    before = status_of(waiting, init=(record(Running(STARTED)),))
    assert before["phase"] == "Pending"
    assert condition(before, "Initialized")["status"] == "False"
    after = status_of(waiting, init=(record(DONE),))
    assert condition(after, "Initialized")["status"] == "True"


@pytest.mark.parametrize(
    ("states", "restarts", "expected"),
    [
        ([Waiting("ContainerCreating")], True, "Pending"),
        ([Running(STARTED), Waiting("ContainerCreating")], True, "Pending"),
        ([Running(STARTED), FAILED], True, "Running"),
        ([FAILED], True, "Running"),
        ([DONE], False, "Succeeded"),
        ([DONE, FAILED], False, "Failed"),
    ],
)
def test_phase(states: list[ContainerState], restarts: bool, expected: str) -> None:
    assert phase([record(s) for s in states], initialized=True, restarts=restarts) == expected


def test_reasons_of_an_end() -> None:
    assert termination_reason(0, oom_killed=False) == "Completed"
    assert termination_reason(1, oom_killed=False) == "Error"
    assert termination_reason(137, oom_killed=True) == "OOMKilled"
