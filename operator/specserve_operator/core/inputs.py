"""What of a spec decides the pods of a pool, as digests: pods are replaced when theirs changes, and only then.

The digests are kept in the cluster and compared by every later version of this program, so they may never change for a
spec that has not. They are made of what the user has given, not of what a version makes of it: values that equal the
API's default are left out, since an API server fills those in on its own. So two rules hold for the API: a default is
never changed, and a new field of these parts is optional. `tests/unit/core/test_inputs.py` has digests to hold to.

Left out is what changes without new pods: replicas and scaling, objectives, rollout bounds, and the run-time settings
of speculation. `speculation.length.max` is compared by itself (core/pinning.py): only raising it needs new pods.
"""

from typing import Any

from pydantic import BaseModel

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.launch import serving_pool
from specserve_operator.core.names import Pool
from specserve_operator.core.revision import digest

# Fields of a pool that change nothing in its pods.
_SIZE = {"replicas", "scaling"}
_SIZE_AND_ENTRANCE = {"replicas", "port"}


def target_inputs(service: SpeculativeService) -> str:
    """What decides the target revision: the content of a KV cache, and how it travels. 10 hex digits."""
    return digest(_target(service))


def pool_inputs(service: SpeculativeService, pool: Pool) -> str:
    """What decides the pods of `pool`, which must be in the spec. 10 hex digits."""
    spec = service.spec
    if pool is Pool.GATEWAY:
        # A gateway pod waits for the requests that decode pods may still have.
        drain = _given(spec.decode, only={"drain_timeout_seconds"})
        return digest({"pool": _given(spec.gateway, without=_SIZE_AND_ENTRANCE), "decode": drain})
    own = _given(serving_pool(service, pool), without=_SIZE)
    parts = {**_target(service), "model": _given(spec.model), "pool": own}
    if spec.prefill is not None:
        parts["kvTransfer"] = _given(spec.kv_transfer)
    if pool is Pool.DECODE and spec.speculation is not None:
        parts["draft"] = _given(spec.speculation.draft)
    return digest(parts)


def _target(service: SpeculativeService) -> dict[str, Any]:
    spec = service.spec
    return {"uri": spec.model.uri, "engine": _given(spec.engine), "transport": _given(spec.kv_transfer, only={"tls"})}


def _given(part: BaseModel, *, only: set[str] | None = None, without: set[str] | None = None) -> dict[str, Any]:
    """The fields of a part of the spec that say more than the API's defaults, as they are written in YAML."""
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=only, exclude=without)
