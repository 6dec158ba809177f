"""Events: one for each transition between two statuses, with the numbers that decided it."""

from collections.abc import Iterator, Mapping
from typing import Any

from specserve_operator.api.conditions import ConditionType, EventReason, Reason
from specserve_operator.api.status import SpeculationState
from specserve_operator.core.conditions import FALSE, TRUE, PreviousCondition, previous_condition
from specserve_operator.core.objects import Event, EventType
from specserve_operator.core.plan import Plan
from specserve_operator.core.snapshot import Snapshot

Status = Mapping[str, Any]

_POD_FAILURES = {
    Reason.CRASH_LOOPING,
    Reason.IMAGE_PULL_FAILED,
    Reason.OUT_OF_MEMORY,
    Reason.MODEL_LOAD_FAILED,
    Reason.TOKENIZER_MISMATCH,
    Reason.HOOKS_NOT_INSTALLED,
    Reason.INSUFFICIENT_CAPACITY,
}

# The service is not as its spec says, and nothing is wrong: its own events tell of it.
_PLANNED = {Reason.ROLLOUT_IN_PROGRESS, Reason.DRAINING}


def transition_events(previous: Status, status: Status, snapshot: Snapshot, plan: Plan) -> list[Event]:
    """What happened between `previous`, the status as it is stored, and `status`, which is about to be written."""
    events = [*_spec_events(previous, status, plan)]
    if not plan.problems:
        events += _rollout_events(previous, status)
        events += _readiness_events(previous, status)
        events += _pod_events(previous, status)
        events += _scaling_events(previous, status)
        events += _speculation_events(previous, status)
        events += _transfer_events(previous, status, snapshot)
    return events


def _spec_events(previous: Status, status: Status, plan: Plan) -> Iterator[Event]:
    if not plan.problems:
        return
    before, now = _pair(previous, status, ConditionType.READY)
    if before is None or (before.reason, before.message) != (now.reason, now.message):
        yield _warning(EventReason.INVALID_SPEC, now.message)


def _rollout_events(previous: Status, status: Status) -> Iterator[Event]:
    before, now = _pair(previous, status, ConditionType.PROGRESSING)
    old, new = _revisions(previous), _revisions(status)
    if now.reason == Reason.ROLLOUT_IN_PROGRESS and old != new:
        changes = [f"{pool} to revision {revision}" for pool, revision in new.items() if old.get(pool) != revision]
        yield _normal(EventReason.ROLLOUT_STARTED, ", ".join(changes) or "pools left the spec")
    if before is None or before.reason == now.reason:
        return
    if now.reason == Reason.ROLLOUT_COMPLETE:
        yield _normal(EventReason.ROLLOUT_COMPLETE, _ready_counts(status))
    elif now.reason == Reason.ROLLOUT_STALLED:
        yield _warning(EventReason.ROLLOUT_STALLED, now.message)


def _readiness_events(previous: Status, status: Status) -> Iterator[Event]:
    before, now = _pair(previous, status, ConditionType.READY)
    was_ready = before is not None and before.status == TRUE
    if now.status == TRUE and not was_ready:
        yield _normal(EventReason.SERVICE_READY, _ready_counts(status))
    elif now.status == FALSE and was_ready and now.reason not in _PLANNED:
        yield _warning(EventReason.SERVICE_NOT_READY, f"{now.reason}: {now.message}")


def _pod_events(previous: Status, status: Status) -> Iterator[Event]:
    """A pool whose pods begin to fail, or fail for another reason."""
    before = {p["name"]: p.get("reason") for p in previous.get("pools") or ()}
    for pool in status.get("pools") or ():
        if pool.get("reason") in _POD_FAILURES and before.get(pool["name"]) != pool["reason"]:
            yield _warning(EventReason.POD_FAILED, f"{pool['name']}: {pool['reason']}: {pool.get('message', '')}")


def _scaling_events(previous: Status, status: Status) -> Iterator[Event]:
    before = {p["name"]: p["desired"] for p in previous.get("pools") or ()}
    for pool in status.get("pools") or ():
        old = before.get(pool["name"])
        if old is not None and old != pool["desired"]:
            yield _normal(EventReason.POOL_SCALED, f"{pool['name']}: {old} -> {pool['desired']} replicas")


def _speculation_events(previous: Status, status: Status) -> Iterator[Event]:
    """A change of the pods' state. The first state that is seen counts only if it is On."""
    old = (previous.get("speculation") or {}).get("state", SpeculationState.OFF)
    now = status.get("speculation") or {}
    new = now.get("state", SpeculationState.OFF)
    if old == new:
        return
    if new == SpeculationState.OFF:
        yield _normal(EventReason.SPECULATION_DISABLED, f"reason {now.get('reason', Reason.NOT_CONFIGURED)}")
    elif old == SpeculationState.OFF:
        yield _normal(EventReason.SPECULATION_ENABLED, f"policy {now.get('policy', 'unknown')}")


def _transfer_events(previous: Status, status: Status, snapshot: Snapshot) -> Iterator[Event]:
    """That there were fallbacks since the last status, with all causes so far, and the end of a time without transfers.

    Where the last status had no totals, the first ones may be old: then nothing is told.
    """
    before, now = previous.get("kvTransfer"), status.get("kvTransfer") or {}
    if before is not None and now.get("fallbacks", 0) > before.get("fallbacks", 0):
        # Without numbers: the same words are one event with a count, however often they are said.
        causes = ", ".join(sorted(cause for cause, count in snapshot.kv_transfer.counted.fallbacks if count))
        yield _warning(
            EventReason.KV_TRANSFER_FALLBACK,
            f"decode pods prefilled prompts themselves, for these causes so far: {causes or 'unknown'}",
        )
    last, current = _pair(previous, status, ConditionType.KV_TRANSFER_READY)
    if last is not None and last.status == FALSE and current.reason == Reason.TRANSFERRING:
        yield _normal(EventReason.KV_TRANSFER_RESUMED, "decode pods get their prompts from prefill pods again")


def _pair(previous: Status, status: Status, type_: ConditionType) -> tuple[PreviousCondition | None, PreviousCondition]:
    now = previous_condition(status, type_)
    if now is None:
        raise ValueError(f"the status has no condition {type_}")
    return previous_condition(previous, type_), now


def _revisions(status: Status) -> dict[str, str]:
    return {p["name"]: p.get("revision", "") for p in status.get("pools") or ()}


def _ready_counts(status: Status) -> str:
    return ", ".join(f"{p['name']} {p['ready']}/{p['desired']}" for p in status.get("pools") or ())


def _normal(reason: EventReason, message: str) -> Event:
    return Event(EventType.NORMAL, str(reason), message)


def _warning(reason: EventReason, message: str) -> Event:
    return Event(EventType.WARNING, str(reason), message)
