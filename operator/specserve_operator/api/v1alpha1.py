"""The custom resources of `specserve.dev/v1alpha1` as pydantic models.

These classes are the border of the program: what a user writes is parsed here once, with unknown fields refused, and
travels on as frozen values. `api/crd.py` turns the same classes into the CRD YAML: the string below a field is its
description there. Pools have their own module, `api/pools.py`. Rules over several fields are stated twice, as a
validator beside them (for `specserve up`, which has no API server) and as CEL in `api/rules.py`, and a test holds the
two together.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from specserve_operator.api.base import ApiModel, EngineArgs, Milliseconds, Percent, Replicas, SecretName
from specserve_operator.api.markers import ListMap
from specserve_operator.api.pools import Gateway, Rollout, ServingPool, TrainingPool
from specserve_operator.constants import API_VERSION

# What is named after a service adds at most 20 characters (`-training-<10 hex digits>`), and label values,
# Service names and host names end at 63. Seven are kept for names to come: a limit can be raised later, never
# lowered.
MAX_SERVICE_NAME_LENGTH = 36
# Service names are DNS labels that start with a letter (RFC 1035).
SERVICE_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
MODEL_URI_PATTERN = r"^(hf|s3|oci)://[^\s]+$|^pvc://[a-z0-9.-]+(/[^\s]*)?$|^file:///.+$"
DRAFT_URI_PATTERN = r"^(pvc|s3|hf)://[^\s]+$|^file:///.+$"
CLASS_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SHA256_PATTERN = r"^[0-9a-f]{64}$"

MAX_PERCENTILES = 8

Percentile = Annotated[int, Field(ge=50, le=99)]


class SpeculationMode(StrEnum):
    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class DraftMethod(StrEnum):
    EAGLE3 = "EAGLE3"
    DRAFT_MODEL = "DraftModel"
    NGRAM = "NGram"
    MEDUSA = "Medusa"


class LengthPolicy(StrEnum):
    DSDE = "DSDE"
    GOODPUT = "Goodput"
    ADAEDL = "AdaEDL"
    STATIC = "Static"


class LengthCap(StrEnum):
    NONE = "None"
    MEAN = "Mean"
    GOODPUT = "Goodput"


class TlsMode(StrEnum):
    AUTOMATIC = "Automatic"
    DISABLED = "Disabled"


class TransferFailurePolicy(StrEnum):
    RECOMPUTE = "Recompute"
    FAIL = "Fail"


class Model(ApiModel):
    """The target model."""

    uri: Annotated[str, Field(pattern=MODEL_URI_PATTERN, max_length=1024)]
    """Where the weights are: hf://org/name@commit, s3://, oci://, pvc://claim/path, or file:///path inside
    the container (in the image, or on a volume that the pool's template mounts)."""
    name: Annotated[str | None, Field(min_length=1, max_length=253)] = None
    """What clients put in `model`. Default: the name of the resource."""
    secret_name: SecretName | None = None
    """Secret in the same namespace with the credentials for `uri`. Refused on one machine, which has no Secrets."""


class Engine(ApiModel):
    """What prefill and decode pods share by construction."""

    image: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    """Container image of the serving pods. Default: from the operator's configuration, as it is when the pods are first
    made; a new default there restarts nothing (condition UpgradeAvailable)."""
    args: EngineArgs = ()
    """Flags for the engine. Those that the operator sets itself are refused by name."""


class TimeToFirstToken(ApiModel):
    """An objective: this percentile of requests gets its first token within the time."""

    percentile: Percentile
    milliseconds: Milliseconds
    milliseconds_per_thousand_input_tokens: Annotated[int, Field(ge=0, le=3_600_000)] = 0
    """Added to `milliseconds` in proportion to the length of the prompt."""


class TimePerOutputToken(ApiModel):
    """An objective: this percentile of requests takes at most so long per token after the first, on
    average."""

    percentile: Percentile
    milliseconds: Milliseconds


TimePerOutputTokenObjectives = Annotated[
    tuple[TimePerOutputToken, ...], Field(max_length=MAX_PERCENTILES), ListMap("percentile")
]


class Objectives(ApiModel):
    """Latency objectives, one per percentile. The first of each list is the one in the columns."""

    time_to_first_token: Annotated[
        tuple[TimeToFirstToken, ...], Field(max_length=MAX_PERCENTILES), ListMap("percentile")
    ] = ()
    """Time from the arrival of a request to its first token."""
    time_per_output_token: TimePerOutputTokenObjectives = ()
    """Time per token after the first."""


class RequestClass(ApiModel):
    """A quality of service that a request can ask for."""

    name: Annotated[str, Field(pattern=CLASS_NAME_PATTERN, max_length=63)]
    priority: Annotated[int, Field(ge=0, le=1000)] = 0
    """Higher is served first."""
    time_per_output_token: TimePerOutputTokenObjectives = ()
    """Objectives of this class. Default: those of the service."""


class Draft(ApiModel):
    """Where draft tokens come from. `NGram` needs no weights; all others do."""

    method: DraftMethod
    """Kind of draft: EAGLE3 head, independent DraftModel, NGram look-up, or Medusa heads."""
    uri: Annotated[str | None, Field(pattern=MODEL_URI_PATTERN, max_length=1024)] = None
    """Where the draft's weights are, in the forms of `model.uri`."""

    @model_validator(mode="after")
    def _uri_where_weights_are_needed(self) -> Self:
        if (self.uri is None) != (self.method is DraftMethod.NGRAM):
            raise ValueError("uri is required, except for method NGram, which has none")
        return self


class Length(ApiModel):
    """How many draft tokens a sequence gets per step. Changed without restarting pods."""

    policy: LengthPolicy = LengthPolicy.DSDE
    """DSDE, Goodput and AdaEDL choose a length per sequence and step; Static always takes `tokens`."""
    cap: LengthCap = LengthCap.MEAN
    """Bound on the length of each sequence: none, the batch's mean, or what maximises goodput."""
    min: Annotated[int, Field(ge=0, le=64)] = 0
    """Least number of draft tokens."""
    max: Annotated[int, Field(ge=1, le=64)] = 8
    """Greatest number of draft tokens. Raising it above what the pods were started with restarts them."""
    tokens: Annotated[int | None, Field(ge=0, le=64)] = None
    """Number of draft tokens of policy Static."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min > self.max:
            raise ValueError("min must not exceed max")
        if (self.tokens is None) == (self.policy is LengthPolicy.STATIC):
            raise ValueError("tokens is required with policy Static, and only there")
        if self.tokens is not None and self.tokens > self.max:
            raise ValueError("tokens must not exceed max")
        return self


class Speculation(ApiModel):
    """Speculative decoding on the decode pods."""

    draft: Draft
    mode: SpeculationMode = SpeculationMode.AUTO
    """Always: on. Never: off. Auto: to be on while it makes decoding faster; until that is measured, it is on like
    Always. Changed without restarting pods."""
    rollout_percent: Percent = 100
    """Share of requests that may be speculated."""
    length: Length = Length()
    control_percent: Annotated[int, Field(ge=0, le=50)] = 2
    """Share of engine time to be decoded by the target alone, to measure the true speed-up. Not built yet: without
    effect."""


class KvTransfer(ApiModel):
    """How KV caches move from prefill to decode pods."""

    tls: TlsMode = TlsMode.AUTOMATIC
    """Automatic: mutual TLS where the network is shared, with certificates that the operator issues to the pods. On one
    machine all traffic stays on loopback, in plain text. Disabled: plain text everywhere."""
    connect_timeout_milliseconds: Milliseconds = 500
    stall_timeout_milliseconds: Milliseconds = 5000
    """A transfer that brings no byte for so long is given up. There is no limit on its whole duration."""
    lease_seconds: Annotated[int, Field(ge=1, le=600)] = 30
    """How long a prefill pod holds the blocks of a request that nobody has pulled."""
    on_failure: TransferFailurePolicy = TransferFailurePolicy.RECOMPUTE
    """Recompute: the decode pod prefills the prompt itself. Fail: the request fails."""


class Budget(ApiModel):
    """Upper bound over all pools. Not built yet: refused."""

    max_gpus: Annotated[int, Field(alias="maxGPUs", ge=1, le=1_000_000)]


class SpeculativeServiceSpec(ApiModel):
    """One model, served by a prefill pool and a decode pool with controlled speculative decoding."""

    model: Model
    engine: Engine = Engine()
    objectives: Objectives = Objectives()
    classes: Annotated[tuple[RequestClass, ...], Field(max_length=16), ListMap("name")] = ()
    """Quality-of-service classes, chosen per request. Not built yet: refused."""
    speculation: Speculation | None = None
    """Left out: no draft is loaded and nothing is speculated."""
    kv_transfer: KvTransfer = KvTransfer()
    budget: Budget | None = None
    prefill: ServingPool | None = None
    """Left out: decode pods prefill their own prompts (aggregated serving)."""
    decode: ServingPool = ServingPool()
    training: TrainingPool | None = None
    """Left out: the draft stays as it is."""
    gateway: Gateway = Gateway()
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        trainable = {DraftMethod.EAGLE3, DraftMethod.DRAFT_MODEL}
        if self.training is not None and (self.speculation is None or self.speculation.draft.method not in trainable):
            raise ValueError("training needs speculation with a trainable draft (EAGLE3 or DraftModel)")
        if self.prefill is not None and _may_be_zero(self.prefill) != _may_be_zero(self.decode):
            raise ValueError("prefill and decode are scaled to zero together or not at all")
        return self


def _may_be_zero(pool: ServingPool) -> bool:
    """True where the pool can be scaled to zero: `replicas: 0` or `scaling.minReplicas: 0`."""
    if pool.scaling is not None:
        return pool.scaling.min_replicas == 0
    return pool.replicas == 0


class ObjectMeta(BaseModel):
    """The part of Kubernetes' ObjectMeta that is read here; everything else passes through untouched."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=253)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class ServiceMeta(ObjectMeta):
    """Metadata of a SpeculativeService, from whose name all others are derived."""

    name: Annotated[str, Field(pattern=SERVICE_NAME_PATTERN, min_length=1, max_length=MAX_SERVICE_NAME_LENGTH)]


class Resource(BaseModel):
    """Base of the resources. `status` stays a plain dict: it is computed and written, never trusted as
    input."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    api_version: Literal["specserve.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    metadata: ObjectMeta
    status: dict[str, Any] = {}

    def to_manifest(self) -> dict[str, Any]:
        """The resource as a plain dict with the fields that were given; defaults are not written out."""
        body = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {**self.model_dump(include={"api_version", "kind"}, by_alias=True), **body}


class SpeculativeService(Resource):
    """One served model."""

    kind: Literal["SpeculativeService"] = "SpeculativeService"
    metadata: ServiceMeta
    spec: SpeculativeServiceSpec


class DraftRevisionSpec(ApiModel):
    """A draft as a versioned object: what it belongs to and how its weights are recognised. Immutable."""

    service: Annotated[str, Field(min_length=1, max_length=MAX_SERVICE_NAME_LENGTH)]
    """Name of the SpeculativeService."""
    target_revision: Annotated[str, Field(min_length=1, max_length=63)]
    """Revision of the target model that the draft was trained for."""
    method: DraftMethod
    uri: Annotated[str, Field(pattern=DRAFT_URI_PATTERN, max_length=1024)]
    """Folder of the weights, in the storage of the service."""
    sha256: Annotated[str, Field(pattern=SHA256_PATTERN, max_length=64)]
    """Of the weights."""
    tokenizer_sha256: Annotated[str, Field(pattern=SHA256_PATTERN, max_length=64)]
    """Of the tokenizer, which must be that of the target."""
    hidden_size: Annotated[int, Field(ge=1, le=1_000_000)]
    """Hidden size of the target."""


class DraftRevision(Resource):
    """One version of a service's draft, from candidate to live or rolled back."""

    kind: Literal["DraftRevision"] = "DraftRevision"
    spec: DraftRevisionSpec


class PoolScalerSpec(ApiModel):
    """The number of pods of one pool, written by an HPA, KEDA or a person through the `/scale`
    subresource."""

    replicas: Replicas


class PoolScaler(Resource):
    """The scale of one pool in mode External. Named `<service>-<pool>` and made by the operator."""

    kind: Literal["PoolScaler"] = "PoolScaler"
    spec: PoolScalerSpec
