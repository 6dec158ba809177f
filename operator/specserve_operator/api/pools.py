"""The pools of a SpeculativeService: how many pods they have, what their template adds, how they are replaced."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from specserve_operator.api.base import ApiModel, EngineArgs, Percent, Replicas, SecretName
from specserve_operator.api.markers import PodTemplate

STORAGE_URI_PATTERN = r"^(pvc|s3)://[^\s]+$|^file:///.+$"
BYTES_PER_SECOND_PATTERN = r"^[1-9][0-9]*(Ki|Mi|Gi)?$"


class ScalingMode(StrEnum):
    AUTO = "Auto"
    ADVISE = "Advise"
    EXTERNAL = "External"


class TrainingMode(StrEnum):
    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Scaling(ApiModel):
    """Who chooses the number of pods, and between which bounds. Auto and Advise are not built yet: with them
    minReplicas and maxReplicas must be the same, and the pool has that size."""

    mode: ScalingMode = ScalingMode.AUTO
    """Auto: from the latency objectives. Advise: only reported. External: an HPA, KEDA or a person writes the
    PoolScaler `<service>-<pool>`, which the operator makes, with the pool's present size in it."""
    min_replicas: Replicas = 1
    max_replicas: Annotated[int, Field(ge=1, le=10_000)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not exceed maxReplicas")
        return self


class PoolBase(ApiModel):
    """What every pool has."""

    template: PodTemplate | None = None
    """A PodTemplateSpec, all of it optional; its container `engine` (of the gateway: `gateway`) is merged
    into the operator's."""


class ServingPool(PoolBase):
    """A pool of engine pods."""

    replicas: Replicas | None = None
    """Fixed number of pods, instead of `scaling`. Default: 1."""
    scaling: Scaling | None = None
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] = 120
    """How long a pod that is stopped may finish its requests."""
    args: EngineArgs = ()
    """Engine flags of this pool alone, after those of `engine.args`."""

    @model_validator(mode="after")
    def _one_writer_of_replicas(self) -> Self:
        if self.replicas is not None and self.scaling is not None:
            raise ValueError("replicas and scaling exclude each other")
        return self


class TrainingScaling(ApiModel):
    """Bounds on the number of training pods."""

    min_replicas: Annotated[int, Field(ge=0, le=64)] = 0
    max_replicas: Annotated[int, Field(ge=1, le=64)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not exceed maxReplicas")
        return self


class Storage(ApiModel):
    """Where drafts outlive the training pod; new decode pods load the live draft from here."""

    uri: Annotated[str, Field(pattern=STORAGE_URI_PATTERN, max_length=1024)]
    """pvc://claim/path, s3://bucket/path or file:///path."""
    secret_name: SecretName | None = None
    """Secret in the same namespace with the credentials for `uri`."""


class Collect(ApiModel):
    """How training samples are taken from live traffic."""

    percent: Percent = 100
    """Share of requests that are sampled."""
    max_tokens: Annotated[int, Field(ge=1, le=10**12)] = 2_000_000
    """Tokens kept at most; older ones make room."""
    max_bytes_per_second: Annotated[str, Field(pattern=BYTES_PER_SECOND_PATTERN, max_length=32)] = "50Mi"
    """Bound on the samples' network traffic per serving pod."""


class Promote(ApiModel):
    """When a new draft replaces the live one."""

    min_acceptance_gain_percent: Percent = 2
    """Percentage points of held-out acceptance that a candidate must gain."""
    canary_percent: Annotated[int, Field(ge=1, le=50)] = 10
    """Share of requests that the candidate serves before the decision."""
    min_requests: Annotated[int, Field(ge=1, le=10**9)] = 200
    """Requests that the decision needs."""
    timeout_seconds: Annotated[int, Field(ge=1, le=604_800)] = 1800
    """A canary undecided for so long is rolled back."""


class TrainingPool(PoolBase):
    """Pods that train the draft on live traffic."""

    storage: Storage
    mode: TrainingMode = TrainingMode.AUTO
    """Auto: when it promises a gain. Always, Never."""
    scaling: TrainingScaling = TrainingScaling()
    collect: Collect = Collect()
    promote: Promote = Promote()


class Gateway(PoolBase):
    """The HTTP entrance in front of the decode pods."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    port: Annotated[int, Field(ge=1, le=65_535)] = 80
    """Port of the Service that clients use."""


class Rollout(ApiModel):
    """How pods are replaced when their revision changes."""

    max_unavailable: Replicas = 0
    max_surge: Replicas = 1
    min_ready_seconds: Annotated[int, Field(ge=0, le=3_600)] = 0
    """How long a new pod has to stay ready before an old one is given up for it."""
    progress_deadline_seconds: Annotated[int, Field(ge=1, le=86_400)] = 1800
    """A rollout without progress for so long is reported as stalled."""

    @model_validator(mode="after")
    def _can_move(self) -> Self:
        if self.max_unavailable == 0 and self.max_surge == 0:
            raise ValueError("maxUnavailable and maxSurge must not both be 0")
        if self.min_ready_seconds >= self.progress_deadline_seconds:
            raise ValueError("minReadySeconds must be less than progressDeadlineSeconds")
        return self
