"""Everything a pod template is rendered from, as values.

A revision is the hash of a launch (core/revision.py) and `render/` sees nothing but the launch. So whatever changes a
pod changes the name of its workload, and nothing else does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve_operator.api.pools import ServingPool
from specserve_operator.api.v1alpha1 import (
    DraftMethod,
    SpeculativeService,
    TlsMode,
    TransferFailurePolicy,
)
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.names import Pool
from specserve_operator.core.revision import digest, target_revision
from specserve_operator.core.weights import Weights, locate_weights

PodTemplate = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DraftLaunch:
    """The drafter a decode engine is started with. `max_tokens`: the most it can draft without a restart."""

    method: DraftMethod
    weights: Weights
    max_tokens: int


@dataclass(frozen=True, slots=True)
class KvTransferLaunch:
    lease_seconds: int
    connect_timeout_ms: int
    stall_timeout_ms: int
    on_failure: TransferFailurePolicy


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """A prefill or decode pod. `kv_transfer` is None where the service is served aggregated.

    `identity_server`: HOST:PORT where its pods get certificates; None where they speak plain text.
    """

    service: str
    pool: Pool
    image: str
    target_revision: str
    model: Weights
    served_model_name: str
    secret_name: str | None
    draft: DraftLaunch | None
    kv_transfer: KvTransferLaunch | None
    identity_server: str | None
    drain_timeout_seconds: int
    engine_args: tuple[str, ...]
    template: PodTemplate | None
    local: bool


@dataclass(frozen=True, slots=True)
class GatewayLaunch:
    """A gateway pod. It leaves no sooner than the longest request that it may carry."""

    service: str
    namespace: str
    image: str
    drain_timeout_seconds: int
    template: PodTemplate | None
    local: bool


def engine_launch(
    service: SpeculativeService, pool: Pool, *, config: OperatorConfig, max_draft_tokens: int | None = None
) -> EngineLaunch:
    """The launch of a pool of engines that is in the spec.

    `max_draft_tokens`: what the drafter is started with, where it is not `length.max`.
    Raises UnsupportedUriError.
    """
    spec, name = service.spec, service.metadata.name
    image = spec.engine.image or config.default_engine_image
    model = locate_weights(spec.model.uri)
    serving = serving_pool(service, pool)
    identity_server = config.identity_server if has_certificates(service, config) else None
    target = target_revision(model, image, engine_args=spec.engine.args)
    return EngineLaunch(
        service=name,
        pool=pool,
        image=image,
        # Pods that speak TLS and pods that do not cannot reach each other.
        target_revision=digest({"target": target, "tls": True}) if identity_server else target,
        model=model,
        served_model_name=spec.model.name or name,
        secret_name=spec.model.secret_name,
        draft=_draft_launch(service, max_draft_tokens) if pool is Pool.DECODE else None,
        kv_transfer=_kv_transfer_launch(service),
        identity_server=identity_server,
        drain_timeout_seconds=serving.drain_timeout_seconds,
        engine_args=spec.engine.args + serving.args,
        template=serving.template,
        local=config.local,
    )


def has_certificates(service: SpeculativeService, config: OperatorConfig) -> bool:
    """Whether the pods of the service get certificates and speak TLS. On one machine their traffic stays on loopback.

    Without a prefill pool and without a certificate service there is only the operator's own traffic to do without.
    """
    wants = service.spec.kv_transfer.tls is TlsMode.AUTOMATIC
    return wants and not config.local and config.identity_server is not None


def gateway_launch(service: SpeculativeService, *, config: OperatorConfig) -> GatewayLaunch:
    return GatewayLaunch(
        service=service.metadata.name,
        namespace=service.metadata.namespace,
        image=config.gateway_image,
        drain_timeout_seconds=service.spec.decode.drain_timeout_seconds,
        template=service.spec.gateway.template,
        local=config.local,
    )


def serving_pool(service: SpeculativeService, pool: Pool) -> ServingPool:
    """The spec of a serving pool. Raises ValueError for one that is not in the spec."""
    serving = {Pool.PREFILL: service.spec.prefill, Pool.DECODE: service.spec.decode}.get(pool)
    if serving is None:
        raise ValueError(f"service {service.metadata.name} has no pool {pool}")
    return serving


def _draft_launch(service: SpeculativeService, max_draft_tokens: int | None) -> DraftLaunch | None:
    speculation = service.spec.speculation
    if speculation is None or speculation.draft.uri is None:
        return None
    return DraftLaunch(
        method=speculation.draft.method,
        weights=locate_weights(speculation.draft.uri),
        max_tokens=max_draft_tokens or speculation.length.max,
    )


def _kv_transfer_launch(service: SpeculativeService) -> KvTransferLaunch | None:
    if service.spec.prefill is None:
        return None
    transfer = service.spec.kv_transfer
    return KvTransferLaunch(
        lease_seconds=transfer.lease_seconds,
        connect_timeout_ms=transfer.connect_timeout_milliseconds,
        stall_timeout_ms=transfer.stall_timeout_milliseconds,
        on_failure=transfer.on_failure,
    )
