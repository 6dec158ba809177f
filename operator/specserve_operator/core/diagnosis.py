"""Why a pod, or a pool, does not serve: one reason and one sentence, from what the cluster says about its pods."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from specserve_operator.api.conditions import Reason
from specserve_operator.core.snapshot import ContainerView, PodView, WorkloadView

_IMAGE_REASONS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
}
_STARTING_REASONS = {"", "ContainerCreating", "PodInitializing"}
# Words with which a worker names what kept it from starting, in its last line.
_WORKER_REASONS = (Reason.TOKENIZER_MISMATCH, Reason.HOOKS_NOT_INSTALLED, Reason.MODEL_LOAD_FAILED)
_WORKER_ERROR = re.compile(r"^error: (?P<text>.*)$", re.MULTILINE)
_MODEL_FLAGS = re.compile(r"^--(draft-)?model\b")
_MAX_MESSAGE_CHARACTERS = 400
# A container that was started again once is given the benefit of the doubt.
_RESTARTS_OF_A_LOOP = 2

# What a person should look at first, where pods of a pool fail in several ways.
_BY_URGENCY = (
    Reason.TOKENIZER_MISMATCH,
    Reason.HOOKS_NOT_INSTALLED,
    Reason.MODEL_LOAD_FAILED,
    Reason.IMAGE_PULL_FAILED,
    Reason.OUT_OF_MEMORY,
    Reason.CRASH_LOOPING,
    Reason.INSUFFICIENT_CAPACITY,
    Reason.PODS_NOT_READY,
    Reason.MODEL_LOADING,
)


@dataclass(frozen=True, slots=True)
class Finding:
    reason: Reason
    message: str


def diagnose_pool(workloads: Iterable[WorkloadView], pods: Iterable[PodView]) -> Finding | None:
    """The most urgent finding of a pool's workloads and pods; None if every pod serves.

    The message names no pod that a restart would rename, so that it stays the same while the cause does.
    """
    findings = [f for f in map(diagnose_pod, pods) if f is not None]
    findings += [
        Finding(Reason.INSUFFICIENT_CAPACITY, _clip(w.replica_failure)) for w in workloads if w.replica_failure
    ]
    return min(findings, key=lambda f: (_BY_URGENCY.index(f.reason), f.message), default=None)


def diagnose_pod(pod: PodView) -> Finding | None:
    """Why `pod` does not serve; None if it does, or if it no longer counts."""
    if pod.ready or not pod.is_active:
        return None
    if pod.unschedulable_message:
        return Finding(Reason.INSUFFICIENT_CAPACITY, _clip(pod.unschedulable_message))
    findings = [f for c in pod.containers if (f := _diagnose_container(c)) is not None]
    if findings:
        return min(findings, key=lambda f: _BY_URGENCY.index(f.reason))
    return Finding(Reason.PODS_NOT_READY, "a pod is being started")


def _diagnose_container(container: ContainerView) -> Finding | None:
    if container.ready:
        return None
    if container.waiting_reason in _IMAGE_REASONS:
        return Finding(Reason.IMAGE_PULL_FAILED, _clip(container.waiting_message or container.waiting_reason))
    if container.exit_code:
        return _diagnose_end(container)
    if container.waiting_reason not in _STARTING_REASONS:
        text = f"{container.waiting_reason}: {container.waiting_message}".removesuffix(": ")
        return Finding(Reason.PODS_NOT_READY, _clip(text))
    if container.is_running:
        return Finding(Reason.MODEL_LOADING, f"container {container.name} is running and not ready yet")
    return None


def _diagnose_end(container: ContainerView) -> Finding:
    """Of a container that ended with an error, whether or not it has been started again."""
    if container.terminated_reason == "OOMKilled":
        return Finding(Reason.OUT_OF_MEMORY, f"container {container.name} was killed for want of memory")
    errors = _WORKER_ERROR.findall(container.terminated_message)
    if errors:
        text = errors[-1]
        named = next((r for r in _WORKER_REASONS if r in text), None)
        fallback = Reason.MODEL_LOAD_FAILED if _MODEL_FLAGS.match(text) else Reason.CRASH_LOOPING
        return Finding(named or fallback, _clip(text))
    ended = f"container {container.name} ended with exit code {container.exit_code}"
    if container.is_running and container.restarts < _RESTARTS_OF_A_LOOP:
        return Finding(Reason.MODEL_LOADING, f"{ended} and is starting again")
    lines = container.terminated_message.strip().splitlines()
    return Finding(Reason.CRASH_LOOPING, _clip(f"{ended}: {lines[-1].strip()}" if lines else ended))


def _clip(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_MESSAGE_CHARACTERS else flat[: _MAX_MESSAGE_CHARACTERS - 1] + "…"
