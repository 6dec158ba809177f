"""The status of a pod as the kubelet writes it, from the states of its containers. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NODE_NAME = "localhost"
HOST_IP = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    started_at: str


@dataclass(frozen=True, slots=True)
class Terminated:
    """`signal` is 0 unless a signal ended it; `exit_code` is then 128 + signal, as in a container."""

    exit_code: int
    reason: str
    message: str
    started_at: str
    finished_at: str
    signal: int = 0


ContainerState = Waiting | Running | Terminated


@dataclass(slots=True)
class ContainerRecord:
    """What is known of one container. `started`: its start-up probe is through."""

    name: str
    image: str = ""
    state: ContainerState = field(default_factory=lambda: Waiting("ContainerCreating"))
    last: Terminated | None = None
    restart_count: int = 0
    started: bool = False
    ready: bool = False

    def render(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "",
            "state": _render_state(self.state),
            "lastState": {} if self.last is None else _render_state(self.last),
            "restartCount": self.restart_count,
            "started": self.started,
            "ready": self.ready,
        }


def _render_state(state: ContainerState) -> dict[str, Any]:
    match state:
        case Waiting():
            waiting = {"reason": state.reason}
            return {"waiting": waiting | ({"message": state.message} if state.message else {})}
        case Running():
            return {"running": {"startedAt": state.started_at}}
        case Terminated():
            rendered: dict[str, Any] = {
                "exitCode": state.exit_code,
                "reason": state.reason,
                "startedAt": state.started_at,
                "finishedAt": state.finished_at,
            }
            if state.signal:
                rendered["signal"] = state.signal
            if state.message:
                rendered["message"] = state.message
            return {"terminated": rendered}


def termination_reason(exit_code: int, *, oom_killed: bool) -> str:
    """The kubelet's word for how a container ended."""
    if oom_killed:
        return "OOMKilled"
    return "Completed" if exit_code == 0 else "Error"


def phase(containers: Sequence[ContainerRecord], *, initialized: bool, restarts: bool) -> str:
    """The pod's phase. `restarts`: its policy restarts what has ended."""
    ended = [c.state for c in containers if isinstance(c.state, Terminated)]
    if containers and len(ended) == len(containers) and not restarts:
        return "Succeeded" if all(state.exit_code == 0 for state in ended) else "Failed"
    never_ran = any(isinstance(c.state, Waiting) and c.last is None for c in containers)
    return "Pending" if never_ran or not initialized else "Running"


def render_pod_status(
    containers: Sequence[ContainerRecord],
    init_containers: Sequence[ContainerRecord],
    *,
    pod_ip: str,
    started_at: str,
    now: str,
    previous: Mapping[str, Any],
    restarts: bool = True,
) -> dict[str, Any]:
    """The whole `status`. A condition that is as in `previous` keeps the time of its last transition."""
    initialized = all(isinstance(c.state, Terminated) and c.state.exit_code == 0 for c in init_containers)
    unready = [c.name for c in containers if not c.ready]
    unready_text = f"containers with unready status: [{' '.join(unready)}]"
    not_ready = ("ContainersNotReady", unready_text) if unready else None
    not_initialized = None if initialized else ("ContainersNotInitialized", "init containers have not finished")
    conditions = {
        "PodScheduled": None,
        "Initialized": not_initialized,
        "ContainersReady": not_ready,
        "Ready": not_ready,
    }
    before = {c["type"]: c for c in previous.get("conditions", ())}
    status: dict[str, Any] = {
        "phase": phase(containers, initialized=initialized, restarts=restarts),
        "conditions": [_condition(type_, why, before.get(type_), now) for type_, why in conditions.items()],
        "hostIP": HOST_IP,
        "startTime": started_at,
        "containerStatuses": [c.render() for c in containers],
    }
    if pod_ip:
        status |= {"podIP": pod_ip, "podIPs": [{"ip": pod_ip}]}
    if init_containers:
        status["initContainerStatuses"] = [c.render() for c in init_containers]
    return status


def _condition(
    type_: str, failure: tuple[str, str] | None, before: Mapping[str, Any] | None, now: str
) -> dict[str, Any]:
    condition = {"type": type_, "status": "True" if failure is None else "False"}
    if failure is not None:
        condition |= {"reason": failure[0], "message": failure[1]}
    unchanged = before is not None and before["status"] == condition["status"]
    condition["lastTransitionTime"] = before["lastTransitionTime"] if unchanged and before else now
    return condition


def is_ready(pod: Mapping[str, Any]) -> bool:
    """True if the pod's condition Ready is true."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
