"""The status of a service whose spec is invalid, so that nothing can be computed from it. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from specserve_operator.api.conditions import ConditionType, EventReason, Reason
from specserve_operator.api.status import Condition, ConditionStatus, format_time
from specserve_operator.core.objects import Event, EventType


def invalid_status(previous: Mapping[str, Any], message: str, *, generation: int, now: datetime) -> dict[str, Any]:
    """The last status with `Ready` false for this generation. What still runs stays shown.

    The other conditions go on to speak of the generation that they were judged by.
    """
    last = {condition["type"]: condition for condition in previous.get("conditions", ())}
    unknown = Condition(
        type=ConditionType.READY,
        status=ConditionStatus.UNKNOWN,
        reason=Reason.PENDING,
        message="the spec is invalid",
        last_transition_time=format_time(now.timestamp()),
        observed_generation=generation,
    )
    invalid = {"status": ConditionStatus.FALSE, "reason": Reason.INVALID_SPEC, "message": message}
    ready = unknown.model_copy(update=invalid).to_manifest()
    if last.get(ConditionType.READY, {}).get("status") == ConditionStatus.FALSE:
        ready["lastTransitionTime"] = last[ConditionType.READY]["lastTransitionTime"]
    others = [
        last.get(kind) or unknown.model_copy(update={"type": kind}).to_manifest()
        for kind in ConditionType
        if kind is not ConditionType.READY
    ]
    return {**previous, "observedGeneration": generation, "conditions": [ready, *others]}


def invalid_event(message: str) -> Event:
    """What is said once for each new status of that kind."""
    return Event(EventType.WARNING, EventReason.INVALID_SPEC, message)
