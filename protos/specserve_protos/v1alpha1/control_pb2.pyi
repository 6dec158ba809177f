from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LengthPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LENGTH_POLICY_UNSPECIFIED: _ClassVar[LengthPolicy]
    LENGTH_POLICY_OFF: _ClassVar[LengthPolicy]
    LENGTH_POLICY_STATIC: _ClassVar[LengthPolicy]
    LENGTH_POLICY_DSDE: _ClassVar[LengthPolicy]

class BatchCap(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_CAP_UNSPECIFIED: _ClassVar[BatchCap]
    BATCH_CAP_NONE: _ClassVar[BatchCap]
    BATCH_CAP_MEAN: _ClassVar[BatchCap]
LENGTH_POLICY_UNSPECIFIED: LengthPolicy
LENGTH_POLICY_OFF: LengthPolicy
LENGTH_POLICY_STATIC: LengthPolicy
LENGTH_POLICY_DSDE: LengthPolicy
BATCH_CAP_UNSPECIFIED: BatchCap
BATCH_CAP_NONE: BatchCap
BATCH_CAP_MEAN: BatchCap

class SpeculationSettings(_message.Message):
    __slots__ = ("policy", "cap", "min_tokens", "max_tokens", "static_tokens")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CAP_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    policy: LengthPolicy
    cap: BatchCap
    min_tokens: int
    max_tokens: int
    static_tokens: int
    def __init__(self, policy: _Optional[_Union[LengthPolicy, str]] = ..., cap: _Optional[_Union[BatchCap, str]] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., static_tokens: _Optional[int] = ...) -> None: ...

class SetSpeculationRequest(_message.Message):
    __slots__ = ("generation", "settings")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    settings: SpeculationSettings
    def __init__(self, generation: _Optional[int] = ..., settings: _Optional[_Union[SpeculationSettings, _Mapping]] = ...) -> None: ...

class SetSpeculationResponse(_message.Message):
    __slots__ = ("in_force", "generation", "applied")
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    in_force: SpeculationSettings
    generation: int
    applied: bool
    def __init__(self, in_force: _Optional[_Union[SpeculationSettings, _Mapping]] = ..., generation: _Optional[int] = ..., applied: _Optional[bool] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("pod_name", "pod_uid", "pool", "revision", "uptime_seconds", "draining", "requests", "speculation", "kv_transfer")
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    pod_name: str
    pod_uid: str
    pool: str
    revision: str
    uptime_seconds: float
    draining: bool
    requests: RequestStats
    speculation: SpeculationStats
    kv_transfer: KvTransferStats
    def __init__(self, pod_name: _Optional[str] = ..., pod_uid: _Optional[str] = ..., pool: _Optional[str] = ..., revision: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., draining: _Optional[bool] = ..., requests: _Optional[_Union[RequestStats, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., kv_transfer: _Optional[_Union[KvTransferStats, _Mapping]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("upper_bounds_ms", "counts", "sum_ms")
    UPPER_BOUNDS_MS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_MS_FIELD_NUMBER: _ClassVar[int]
    upper_bounds_ms: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum_ms: float
    def __init__(self, upper_bounds_ms: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum_ms: _Optional[float] = ...) -> None: ...

class RequestStats(_message.Message):
    __slots__ = ("started", "succeeded", "failed", "refused", "running", "time_to_first_token", "time_per_output_token", "prompt_tokens", "output_tokens", "cancelled")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    started: int
    succeeded: int
    failed: int
    refused: int
    running: int
    time_to_first_token: Histogram
    time_per_output_token: Histogram
    prompt_tokens: int
    output_tokens: int
    cancelled: int
    def __init__(self, started: _Optional[int] = ..., succeeded: _Optional[int] = ..., failed: _Optional[int] = ..., refused: _Optional[int] = ..., running: _Optional[int] = ..., time_to_first_token: _Optional[_Union[Histogram, _Mapping]] = ..., time_per_output_token: _Optional[_Union[Histogram, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cancelled: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("in_force", "generation", "started_max_tokens", "by_policy", "refilled_sequences", "refilled_tokens", "draft_forwards", "steps_without_draft")
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STARTED_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BY_POLICY_FIELD_NUMBER: _ClassVar[int]
    REFILLED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    REFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_WITHOUT_DRAFT_FIELD_NUMBER: _ClassVar[int]
    in_force: SpeculationSettings
    generation: int
    started_max_tokens: int
    by_policy: _containers.RepeatedCompositeFieldContainer[PolicyStats]
    refilled_sequences: int
    refilled_tokens: int
    draft_forwards: int
    steps_without_draft: int
    def __init__(self, in_force: _Optional[_Union[SpeculationSettings, _Mapping]] = ..., generation: _Optional[int] = ..., started_max_tokens: _Optional[int] = ..., by_policy: _Optional[_Iterable[_Union[PolicyStats, _Mapping]]] = ..., refilled_sequences: _Optional[int] = ..., refilled_tokens: _Optional[int] = ..., draft_forwards: _Optional[int] = ..., steps_without_draft: _Optional[int] = ...) -> None: ...

class PolicyStats(_message.Message):
    __slots__ = ("policy", "verified_sequences", "drafted_tokens", "accepted_tokens", "drafted_by_position", "accepted_by_position", "kld_sum_nats", "kld_positions")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    KLD_SUM_NATS_FIELD_NUMBER: _ClassVar[int]
    KLD_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    policy: LengthPolicy
    verified_sequences: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_by_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    kld_sum_nats: float
    kld_positions: int
    def __init__(self, policy: _Optional[_Union[LengthPolicy, str]] = ..., verified_sequences: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., drafted_by_position: _Optional[_Iterable[int]] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., kld_sum_nats: _Optional[float] = ..., kld_positions: _Optional[int] = ...) -> None: ...

class KvTransferStats(_message.Message):
    __slots__ = ("remote_prefills", "loaded_tokens", "loaded_bytes", "fallbacks", "served_transfers", "served_bytes", "open_leases", "expired_leases")
    REMOTE_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    SERVED_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    remote_prefills: int
    loaded_tokens: int
    loaded_bytes: int
    fallbacks: _containers.RepeatedCompositeFieldContainer[Fallback]
    served_transfers: int
    served_bytes: int
    open_leases: int
    expired_leases: int
    def __init__(self, remote_prefills: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., fallbacks: _Optional[_Iterable[_Union[Fallback, _Mapping]]] = ..., served_transfers: _Optional[int] = ..., served_bytes: _Optional[int] = ..., open_leases: _Optional[int] = ..., expired_leases: _Optional[int] = ...) -> None: ...

class Fallback(_message.Message):
    __slots__ = ("cause", "count")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    cause: str
    count: int
    def __init__(self, cause: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: int
    def __init__(self, timeout_seconds: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained", "running")
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    running: int
    def __init__(self, drained: _Optional[bool] = ..., running: _Optional[int] = ...) -> None: ...
