"""The status of a PoolScaler: what an autoscaler, or the person who scales, is told."""

from typing import Any

from specserve_operator.api.conditions import Reason
from specserve_operator.api.status import PoolScalerStatus
from specserve_operator.constants import API_VERSION
from specserve_operator.core.names import pool_scaler_name, selector
from specserve_operator.core.objects import ObjectRef
from specserve_operator.core.plan import Plan, ScalerPlan
from specserve_operator.core.snapshot import Snapshot

POOL_SCALER_KIND = "PoolScaler"


def scaler_ref(snapshot: Snapshot, scaler: ScalerPlan) -> ObjectRef:
    """Names the PoolScaler of a pool."""
    meta = snapshot.service.metadata
    return ObjectRef(API_VERSION, POOL_SCALER_KIND, meta.namespace, pool_scaler_name(meta.name, scaler.pool))


def compute_scaler_statuses(snapshot: Snapshot, plan: Plan) -> dict[ObjectRef, dict[str, Any]]:
    """What is to be written: of each PoolScaler whose status says something else, also of one that is just made."""
    statuses = {}
    for scaler in plan.scalers:
        live = snapshot.scaler(scaler.pool)
        status = _compute_status(snapshot, scaler, generation=1 if live is None else live.generation)
        if live is None or live.status != status:
            statuses[scaler_ref(snapshot, scaler)] = status
    return statuses


def _compute_status(snapshot: Snapshot, scaler: ScalerPlan, *, generation: int) -> dict[str, Any]:
    labels = selector(snapshot.service.metadata.name, scaler.pool)
    return PoolScalerStatus(
        observed_generation=generation,
        replicas=sum(p.is_active for p in snapshot.pool_pods(scaler.pool)),
        selector=",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        desired_replicas=scaler.desired,
        reason=scaling_reason(scaler),
    ).to_manifest()


def scaling_reason(scaler: ScalerPlan) -> Reason:
    """Why the pool has the size that it has."""
    if scaler.asked > scaler.desired:
        return Reason.MAX_REPLICAS_REACHED
    if scaler.asked < scaler.desired:
        return Reason.MIN_REPLICAS_REACHED
    return Reason.EXTERNALLY_SCALED
