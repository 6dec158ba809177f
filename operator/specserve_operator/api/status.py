"""Status of the custom resources: what `kubectl describe` shows.

Computed by the core and written whole; never trusted as input. Integers carry their unit in the name; ratios that need
decimals are strings (`"2.7"`), because floats do not survive every client unchanged. A field is absent until it is
known. Words from closed sets (`reason`, `type`) are typed here and open in the CRD: a newer operator may report a value
that an older CRD does not list.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from specserve_operator.api.base import ApiModel
from specserve_operator.api.conditions import ConditionType, Reason
from specserve_operator.api.markers import Atomic, ListMap
from specserve_operator.api.v1alpha1 import MAX_PERCENTILES

MAX_SCALING_HISTORY = 10

_OPEN_WORD = WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 253})
OpenConditionType = Annotated[ConditionType, _OPEN_WORD]
OpenReason = Annotated[Reason, _OPEN_WORD]
Message = Annotated[str, Field(max_length=32_768)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
Count = Annotated[int, Field(ge=0)]
Percent = Annotated[int, Field(ge=0, le=100)]
DecimalString = Annotated[str, Field(pattern=r"^-?[0-9]+(\.[0-9]+)?$", max_length=32)]
Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]


def format_time(seconds: float) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes `metav1.Time`. `seconds` since the epoch."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class StatusModel(ApiModel):
    """A part of a status."""

    def to_manifest(self) -> dict[str, Any]:
        """Plain camelCase dict; fields that are not known (None) are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusModel):
    """One aspect of the service, as metav1.Condition."""

    type: OpenConditionType
    status: ConditionStatus
    reason: OpenReason
    message: Message = ""
    last_transition_time: Time
    """When `status` changed last."""
    observed_generation: Count = 0
    """Generation of the spec that the condition speaks of."""


class PoolStatus(StatusModel):
    """One pool."""

    name: Name
    desired: Count
    """Pods wanted."""
    replicas: Count
    """Pods that exist, of any revision."""
    ready: Count
    """Pods that serve."""
    updated: Count
    """Pods of the wanted revision."""
    revision: Annotated[str, Field(max_length=63)] = ""
    """The wanted revision."""
    reason: OpenReason | None = None
    """Why not all pods are ready."""
    message: Message | None = None


class LatencyObservation(StatusModel):
    """One percentile, observed over a window that ends now."""

    percentile: Annotated[int, Field(ge=1, le=100)]
    observed_milliseconds: Count | None = None
    """Absent without samples."""
    objective_milliseconds: Count | None = None
    samples: Count = 0
    window_seconds: Count


Observations = Annotated[tuple[LatencyObservation, ...], Field(max_length=MAX_PERCENTILES), ListMap("percentile")]


class LatencyStatus(StatusModel):
    """Observed latencies against their objectives, in the order of the objectives."""

    time_to_first_token: Observations = ()
    time_per_output_token: Observations = ()


class SpeculationState(StrEnum):
    ON = "On"
    OFF = "Off"
    CANARY = "Canary"


class Speedup(StatusModel):
    """Decoding speed with speculation over that without, from control windows, with its 95 % interval."""

    ratio: DecimalString
    low: DecimalString
    high: DecimalString
    windows: Count


class SpeculationStatus(StatusModel):
    """What the decode pods do."""

    state: SpeculationState
    """On, Off, or Canary: on, and a part of the decode pods tries another draft."""
    reason: OpenReason | None = None
    message: Message | None = None
    policy: Name | None = None
    """Length policy in force."""
    acceptance_percent: Percent | None = None
    """Accepted of the proposed draft tokens."""
    mean_accepted_length: DecimalString | None = None
    """Tokens per verification, the target's own included: 1.0 means that nothing was accepted."""
    speedup: Speedup | None = None
    draft: Annotated[str, Field(max_length=1024)] | None = None
    """The live draft."""


class KvTransferStatus(StatusModel):
    """Totals of all decode pods that the service has had, as far as an operator has asked them. What a pod counts after
    it was last asked is missing. What pods count while no operator runs shows only where the pods that are there
    afterwards have counted more, since their containers were last started, than these totals said: after pods or
    containers were replaced it is missing in part or in whole, without an event. The totals begin anew if the spec has
    no prefill pool when an operator starts."""

    transfers: Count = 0
    fallbacks: Count = 0
    """Prompts that a decode pod prefilled itself because no KV cache came."""
    bytes: Count = 0
    tokens: Count = 0


class ScalingDecision(StatusModel):
    """One change of a pool's size, or one that was held back."""

    time: Time
    pool: Name
    from_replicas: Count
    to_replicas: Count
    reason: OpenReason
    message: Message = ""
    """The numbers that decided."""


class Columns(StatusModel):
    """Cells of `kubectl get` that no JSONPath can compute, like `2/2`, `38ms/500ms` and `62%`."""

    prefill: str = ""
    decode: str = ""
    train: str = ""
    ttft: str = ""
    tpot: str = ""
    acceptance: str = ""
    speculation: str = ""
    draft: str = ""
    speedup: str = ""
    kv_fallbacks: str = ""


class ServiceStatus(StatusModel):
    """What the operator observed."""

    observed_generation: Count = 0
    """Generation of the spec that this status speaks of."""
    endpoint: Annotated[str, Field(max_length=1024)] | None = None
    """Base URL of the OpenAI API."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=32), ListMap("type")] = ()
    pools: Annotated[tuple[PoolStatus, ...], Field(max_length=8), ListMap("name")] = ()
    latency: LatencyStatus | None = None
    speculation: SpeculationStatus | None = None
    kv_transfer: KvTransferStatus | None = None
    scaling_history: Annotated[tuple[ScalingDecision, ...], Field(max_length=MAX_SCALING_HISTORY), Atomic()] = ()
    """The last decisions, newest first."""
    columns: Columns | None = None


class DraftState(StrEnum):
    """`Candidate` -> `Canary` -> `Live` -> `Superseded`; `Rejected` before its canary, `RolledBack` after it began."""

    CANDIDATE = "Candidate"
    CANARY = "Canary"
    LIVE = "Live"
    ROLLED_BACK = "RolledBack"
    REJECTED = "Rejected"
    SUPERSEDED = "Superseded"


class HeldOutAcceptance(StatusModel):
    """Acceptance of this draft and of the live one on the same held-out samples."""

    samples: Count
    draft_percent: Percent
    live_percent: Percent | None = None


class CanaryArm(StatusModel):
    """What was measured in one arm of a canary: this draft, the live draft, or the target alone."""

    name: Name
    windows: Count = 0
    requests: Count = 0
    acceptance_percent: Percent | None = None
    time_per_output_token_microseconds: Count | None = None


class DraftRevisionStatus(StatusModel):
    """How far a draft came, and why."""

    observed_generation: Count = 0
    state: DraftState = DraftState.CANDIDATE
    reason: OpenReason | None = None
    message: Message | None = None
    trained_tokens: Count | None = None
    """Tokens that the draft was trained on."""
    held_out: HeldOutAcceptance | None = None
    canary: Annotated[tuple[CanaryArm, ...], Field(max_length=4), ListMap("name")] = ()
    created_time: Time | None = None
    canary_time: Time | None = None
    decided_time: Time | None = None
    """When the draft became live, was rejected or rolled back."""


class PoolScalerStatus(StatusModel):
    """The pool's real size, and the size that it is to have."""

    observed_generation: Count = 0
    replicas: Count = 0
    """Pods that exist."""
    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector of the pool's pods, which an HPA needs."""
    desired_replicas: Count | None = None
    """Pods that the pool is to have: `spec.replicas` within minReplicas and maxReplicas of the service."""
    reason: OpenReason | None = None
    """ExternallyScaled, or the bound that holds the pool."""
