"""What is wrong with a spec beyond its schema: combinations that this version cannot serve.

The schema allows them, so that manifests of later versions stay readable; they are refused here with the field and
the way out, before any pod is touched.
"""

from collections.abc import Iterator

from specserve_operator.api.pools import ScalingMode, ServingPool
from specserve_operator.api.v1alpha1 import (
    DraftMethod,
    LengthCap,
    LengthPolicy,
    Speculation,
    SpeculativeService,
    TlsMode,
)
from specserve_operator.constants import ENGINE_CONTAINER, GATEWAY_CONTAINER
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.pod_template import template_problems
from specserve_operator.core.weights import UnsupportedUriError, locate_weights

DRAFT_METHODS = {DraftMethod.DRAFT_MODEL}
LENGTH_POLICIES = {LengthPolicy.DSDE, LengthPolicy.STATIC}
LENGTH_CAPS = {LengthCap.NONE, LengthCap.MEAN}


def find_problems(service: SpeculativeService, config: OperatorConfig) -> tuple[str, ...]:
    """One sentence for each thing that keeps the service from being served; empty if there is none."""
    return tuple(_problems(service, config))


def _problems(service: SpeculativeService, config: OperatorConfig) -> Iterator[str]:
    spec = service.spec
    yield from _uri_problems("spec.model.uri", spec.model.uri, config)
    if spec.model.secret_name is not None and config.local:
        yield (
            "spec.model.secretName: there are no Secrets on one machine; remove it and set HF_TOKEN where you start "
            "specserve"
        )
    if spec.classes:
        yield "spec.classes: requests are not classed in this version; remove it"
    if spec.speculation is not None:
        yield from _speculation_problems(spec.speculation, config)
    if spec.prefill is not None and spec.kv_transfer.tls is TlsMode.AUTOMATIC and not config.local:
        yield from _identity_problems(config)
    if spec.budget is not None:
        yield "spec.budget: there is no upper bound on GPUs in this version; remove it"
    yield from _scaling_problems("spec.prefill", spec.prefill)
    yield from _scaling_problems("spec.decode", spec.decode)
    if spec.training is not None:
        yield "spec.training: drafts are not trained in this version; remove it"
    yield from template_problems("spec.decode.template", spec.decode.template, ENGINE_CONTAINER)
    yield from template_problems("spec.gateway.template", spec.gateway.template, GATEWAY_CONTAINER)
    if spec.prefill is not None:
        yield from template_problems("spec.prefill.template", spec.prefill.template, ENGINE_CONTAINER)


def _identity_problems(config: OperatorConfig) -> Iterator[str]:
    """KV caches are never moved unencrypted because of how the operator happens to be started."""
    if config.identity_server is None:
        yield (
            "spec.kvTransfer.tls: this operator gives pods no certificates; start it with --identity-service and "
            "--identity-secret, or set Disabled (KV caches then move unencrypted)"
        )


def _scaling_problems(field: str, pool: ServingPool | None) -> Iterator[str]:
    """Bounds that leave one size are that size, whoever is to choose it."""
    scaling = pool.scaling if pool is not None else None
    if scaling is None or scaling.mode is ScalingMode.EXTERNAL or scaling.min_replicas == scaling.max_replicas:
        return
    yield (
        f"{field}.scaling: mode {scaling.mode} is not built yet; use External, {field}.replicas, or set minReplicas "
        "and maxReplicas to the same number"
    )


def _uri_problems(field: str, uri: str, config: OperatorConfig) -> Iterator[str]:
    try:
        weights = locate_weights(uri)
    except UnsupportedUriError as error:
        yield f"{field}: {error}"
        return
    if weights.claim is not None and config.local:
        yield f"{field}: pvc:// needs a Kubernetes cluster; here use file:// or hf://"


def _speculation_problems(speculation: Speculation, config: OperatorConfig) -> Iterator[str]:
    draft, length = speculation.draft, speculation.length
    if draft.method not in DRAFT_METHODS:
        yield f"spec.speculation.draft.method: {draft.method} is not supported in this version; use DraftModel"
    elif draft.uri is not None:
        yield from _uri_problems("spec.speculation.draft.uri", draft.uri, config)
    if length.policy not in LENGTH_POLICIES:
        yield (f"spec.speculation.length.policy: {length.policy} is not supported in this version; use DSDE or Static")
    if length.cap not in LENGTH_CAPS:
        yield f"spec.speculation.length.cap: {length.cap} is not supported in this version; use Mean or None"
    if 0 < speculation.rollout_percent < 100:
        yield (
            f"spec.speculation.rolloutPercent: {speculation.rollout_percent} is not supported in this version; "
            "use 100 (all requests) or 0 (none)"
        )
