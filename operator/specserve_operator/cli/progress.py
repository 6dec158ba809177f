"""From two looks at a service to the lines that say what changed, and whether it came up. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve_operator.api.conditions import ConditionType, Reason
from specserve_operator.cli.output import condition_of, is_pod_ready, one_line, pod_state
from specserve_operator.constants import LABEL_POOL, LABEL_REVISION
from specserve_operator.core.objects import Manifest

# Nothing that happens by itself makes these good again: waiting on would only hide the message.
_HOPELESS = {
    Reason.INVALID_SPEC,
    Reason.MODEL_LOAD_FAILED,
    Reason.TOKENIZER_MISMATCH,
    Reason.HOOKS_NOT_INSTALLED,
}
# A pod may fail once by bad luck (a port taken for a moment, memory); twice in a row it is no luck.
_HOPELESS_AFTER_RESTARTS = {Reason.CRASH_LOOPING, Reason.OUT_OF_MEMORY}
_RESTARTS_TO_GIVE_UP = 2
# Shown by the pods themselves, or of no interest while a service comes up.
_NO_NEWS_TYPES = {ConditionType.PROGRESSING, ConditionType.UPGRADE_AVAILABLE}
_POOLS = {
    ConditionType.GATEWAY_READY: "gateway",
    ConditionType.PREFILL_READY: "prefill",
    ConditionType.DECODE_READY: "decode",
    ConditionType.TRAINING_READY: "training",
}


@dataclass(frozen=True, slots=True)
class View:
    """A service (None before it is stored) and its pods at one moment."""

    service: Manifest | None = None
    pods: Sequence[Manifest] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a service will not become ready: a condition, and the pod whose log tells more."""

    condition: str
    reason: str
    message: str
    pod: str | None


def describe_changes(before: View, after: View) -> list[str]:
    """One line for each pod and condition that is not what it was."""
    return [*_pod_changes(before, after), *_condition_changes(before, after)]


def is_ready(service: Manifest | None) -> bool:
    """True where condition `Ready` is true for the generation that is stored."""
    if service is None:
        return False
    return _is_current(service) and condition_of(service, "Ready").get("status") == "True"


def _is_current(service: Manifest) -> bool:
    """True where the status speaks of the spec that is stored, not of the one before."""
    observed = service.get("status", {}).get("observedGeneration", 0)
    return bool(observed == service["metadata"].get("generation", 0))


def find_failure(view: View) -> Failure | None:
    """The condition that will not get better without the user; None while there is hope, or an old status."""
    if view.service is None or not _is_current(view.service):
        return None
    return next((_failure(c, view) for c in _wanting(view) if _is_hopeless(c, view)), None)


def _is_hopeless(condition: Mapping[str, Any], view: View) -> bool:
    reason = condition.get("reason")
    if reason in _HOPELESS_AFTER_RESTARTS:
        pods = [pod for pod in _pods_about(condition, view) if _is_wanted(pod, view)]
        return max(map(_restart_count, pods), default=0) >= _RESTARTS_TO_GIVE_UP
    return reason in _HOPELESS


def _pods_about(condition: Mapping[str, Any], view: View) -> list[Manifest]:
    """The pods of the pool that the condition is about; all of them for one about the whole service."""
    pool = _POOLS.get(condition["type"])
    return [pod for pod in view.pods if pool in (None, _label(pod, LABEL_POOL))]


def _is_wanted(pod: Manifest, view: View) -> bool:
    """False for a pod of another revision than the one its pool is to have, which is on its way out."""
    pools = (view.service or {}).get("status", {}).get("pools", ())
    wanted = next((p.get("revision") for p in pools if p.get("name") == _label(pod, LABEL_POOL)), None)
    return not wanted or _label(pod, LABEL_REVISION) == wanted


def _label(pod: Manifest, label: str) -> str | None:
    value = pod["metadata"].get("labels", {}).get(label)
    return None if value is None else str(value)


def find_obstacle(view: View) -> Failure | None:
    """What keeps a service from being ready now, for when the time is up."""
    return next((_failure(condition, view) for condition in _wanting(view)), None)


def _wanting(view: View) -> list[Mapping[str, Any]]:
    """False conditions of the parts, and after them that of the whole, which only repeats the first of them."""
    if view.service is None or is_ready(view.service):
        return []
    conditions = view.service.get("status", {}).get("conditions", ())
    wanting = [c for c in conditions if c.get("status") == "False" and (c["type"] in _POOLS or c["type"] == "Ready")]
    return sorted(wanting, key=lambda c: c["type"] == "Ready")


def worst_pod(pods: Sequence[Manifest]) -> str | None:
    """The pod whose log is most likely to tell what is wrong: of those not ready, that with most restarts."""
    not_ready = [pod for pod in pods if not is_pod_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
    if not not_ready:
        return None
    return str(max(not_ready, key=_restart_count)["metadata"]["name"])


def _failure(condition: Mapping[str, Any], view: View) -> Failure:
    """With the pod that the message names, or else the worst one of the pool that the condition is about."""
    message = one_line(str(condition.get("message", "")))
    named = [pod for pod in view.pods if str(pod["metadata"]["name"]) in message]
    blamed = worst_pod(named or _pods_about(condition, view))
    return Failure(str(condition["type"]), str(condition["reason"]), message, blamed)


def _pod_changes(before: View, after: View) -> list[str]:
    old = {pod["metadata"]["name"]: _pod_news(pod) for pod in before.pods}
    new = {pod["metadata"]["name"]: _pod_news(pod) for pod in after.pods}
    lines = [f"pod/{name}: {news}" for name, news in sorted(new.items()) if old.get(name) != news]
    return lines + [f"pod/{name}: gone" for name in sorted(old.keys() - new.keys())]


def _pod_news(pod: Manifest) -> str:
    state = pod_state(pod)
    if state == "Running":
        state = "Ready" if is_pod_ready(pod) else "Running, not ready"
    restarts = _restart_count(pod)
    return f"{state} (restarts: {restarts})" if restarts else state


def _restart_count(pod: Manifest) -> int:
    return sum(int(s.get("restartCount", 0)) for s in pod.get("status", {}).get("containerStatuses", ()))


def _condition_changes(before: View, after: View) -> list[str]:
    if after.service is None:
        return []
    name = after.service["metadata"]["name"]
    lines = []
    for condition in after.service.get("status", {}).get("conditions", ()):
        old = condition_of(before.service or {}, condition["type"])
        is_same = all(old.get(field) == condition.get(field) for field in ("status", "reason"))
        if is_same or not _is_news(condition):
            continue
        message = one_line(str(condition.get("message", "")))
        verdict = f"{condition['type']}={condition['status']} ({condition['reason']})"
        lines.append(f"service/{name}: {verdict}" + (f": {message}" if message else ""))
    return lines


def _is_news(condition: Mapping[str, Any]) -> bool:
    """False for what nobody waits for, and for a summary that only repeats its parts."""
    if condition.get("status") == "Unknown" or condition.get("reason") == Reason.NOT_CONFIGURED:
        return False
    if condition["type"] == ConditionType.READY:
        return condition["status"] == "True" or condition.get("reason") == Reason.INVALID_SPEC
    return condition["type"] not in _NO_NEWS_TYPES
