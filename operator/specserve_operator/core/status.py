"""The status of a service: computed whole from what is observed, never added up.

Only times, the last word on things that need traffic or an answer, and what earlier control planes counted come from
the previous status.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from specserve_operator.api.conditions import ConditionType, Reason
from specserve_operator.api.status import (
    MAX_SCALING_HISTORY,
    Columns,
    Condition,
    KvTransferStatus,
    LatencyObservation,
    LatencyStatus,
    ScalingDecision,
    ServiceStatus,
    SpeculationStatus,
    format_time,
)
from specserve_operator.core.conditions import (
    TRUE,
    Judgement,
    judge_gateway,
    judge_kv_transfer,
    judge_objectives,
    judge_pool,
    judge_progress,
    judge_ready,
    judge_speculation,
    judge_upgrade,
    previous_condition,
)
from specserve_operator.core.invalid import invalid_status
from specserve_operator.core.measurements import (
    compute_kv_transfer,
    compute_latency,
    compute_speculation,
    decode_stats,
)
from specserve_operator.core.names import Pool, gateway_name, pool_scaler_name
from specserve_operator.core.objects import ApplyFailure
from specserve_operator.core.plan import Plan, ScalerPlan
from specserve_operator.core.pools import PoolState, compute_pool_state
from specserve_operator.core.scalers import scaling_reason
from specserve_operator.core.snapshot import Snapshot
from specserve_operator.core.stats import PoolStats

_HTTP_PORT = 80


def compute_status(snapshot: Snapshot, plan: Plan, failures: Sequence[ApplyFailure] = ()) -> dict[str, Any]:
    """`status` as it is to be written; equal to the previous one while nothing has changed.

    `failures`: objects of the plan that could not be applied.
    A service with an invalid spec keeps the rest of its status: what ran keeps running.
    """
    if plan.resolution is None:
        return _invalid_status(snapshot, plan)
    service = snapshot.service
    pools = [compute_pool_state(snapshot, p) for p in plan.pools]
    stats = decode_stats(snapshot, plan)
    window_seconds = snapshot.config.stats_window_seconds
    latency = compute_latency(service, stats, window_seconds=window_seconds)
    kv_transfer = _kv_transfer(snapshot)
    judgements = _judge(snapshot, pools, failures, stats=stats, latency=latency, kv_transfer=kv_transfer)
    judgements[ConditionType.UPGRADE_AVAILABLE] = judge_upgrade(snapshot, plan.resolution)
    speculation = _with_reason(compute_speculation(snapshot, stats), judgements)
    return ServiceStatus(
        observed_generation=service.metadata.generation,
        endpoint=_endpoint(snapshot),
        conditions=_conditions(snapshot, judgements),
        pools=tuple(p.to_status() for p in pools),
        latency=latency,
        speculation=speculation,
        kv_transfer=kv_transfer,
        scaling_history=_scaling_history(snapshot, pools, plan.scalers),
        columns=_columns(pools, latency=latency, speculation=speculation, kv_transfer=kv_transfer),
    ).to_manifest()


def _judge(
    snapshot: Snapshot,
    pools: Sequence[PoolState],
    failures: Sequence[ApplyFailure],
    *,
    stats: PoolStats,
    latency: LatencyStatus,
    kv_transfer: KvTransferStatus | None,
) -> dict[ConditionType, Judgement]:
    """Every condition that the pods decide, in the order in which they are shown."""
    by_pool = {p.pool: p for p in pools}
    previous = snapshot.service.status
    gateway = judge_gateway(snapshot, by_pool[Pool.GATEWAY], failures)
    not_configured = Judgement(TRUE, Reason.NOT_CONFIGURED, "the spec has no training pool")
    return {
        ConditionType.READY: judge_ready(pools, failures, gateway),
        ConditionType.GATEWAY_READY: gateway,
        ConditionType.PREFILL_READY: judge_pool(by_pool.get(Pool.PREFILL)),
        ConditionType.DECODE_READY: judge_pool(by_pool[Pool.DECODE]),
        ConditionType.TRAINING_READY: not_configured,
        ConditionType.KV_TRANSFER_READY: judge_kv_transfer(
            snapshot,
            stats,
            kv_transfer or KvTransferStatus(),
            previous_condition(previous, ConditionType.KV_TRANSFER_READY),
        ),
        ConditionType.SPECULATION_EFFECTIVE: judge_speculation(
            snapshot, stats, previous_condition(previous, ConditionType.SPECULATION_EFFECTIVE)
        ),
        ConditionType.OBJECTIVES_MET: judge_objectives(
            snapshot, stats, latency, previous_condition(previous, ConditionType.OBJECTIVES_MET)
        ),
        ConditionType.DRAFT_UP_TO_DATE: not_configured,
        ConditionType.PROGRESSING: judge_progress(
            snapshot, pools, previous_condition(previous, ConditionType.PROGRESSING)
        ),
    }


def _invalid_status(snapshot: Snapshot, plan: Plan) -> dict[str, Any]:
    """The previous status with Ready=False and the problems, and the pods that there are by now."""
    meta, previous = snapshot.service.metadata, snapshot.service.status
    status = invalid_status(previous, "; ".join(plan.problems), generation=meta.generation, now=snapshot.now)
    if "pools" not in status:
        return status
    status["pools"] = [_recounted(snapshot, pool) for pool in status["pools"]]
    counts = {pool["name"]: f"{pool['ready']}/{pool['desired']}" for pool in status["pools"]}
    columns = status.get("columns") or {}
    return status | {"columns": columns | {name: counts[name] for name in columns.keys() & counts.keys()}}


def _recounted(snapshot: Snapshot, pool: Mapping[str, Any]) -> dict[str, Any]:
    """A pool of a stored status with the pods of now."""
    pods = [p for p in snapshot.pods if p.pool == pool["name"] and p.is_active]
    updated = sum(p.revision == pool.get("revision", "") for p in pods)
    return {**pool, "replicas": len(pods), "updated": updated, "ready": sum(p.ready for p in pods)}


def _conditions(snapshot: Snapshot, judgements: Mapping[ConditionType, Judgement]) -> tuple[Condition, ...]:
    """With the time of the last flip: now, where the status differs from the previous one."""
    now = format_time(snapshot.now.timestamp())
    conditions = []
    for type_, judgement in judgements.items():
        last = previous_condition(snapshot.service.status, type_)
        is_same = last is not None and last.status == judgement.status and last.transition is not None
        conditions.append(
            Condition(
                type=type_,
                status=judgement.status,
                reason=judgement.reason,
                message=judgement.message,
                last_transition_time=_format(last.transition) if is_same and last and last.transition else now,
                observed_generation=snapshot.service.metadata.generation,
            )
        )
    return tuple(conditions)


def _format(time: datetime) -> str:
    return format_time(time.timestamp())


def _kv_transfer(snapshot: Snapshot) -> KvTransferStatus | None:
    """None without a prefill pool."""
    if snapshot.service.spec.prefill is None:
        return None
    return compute_kv_transfer(snapshot.kv_transfer, snapshot.kv_transfer_found)


def _with_reason(
    speculation: SpeculationStatus | None, judgements: Mapping[ConditionType, Judgement]
) -> SpeculationStatus | None:
    if speculation is None:
        return None
    return speculation.model_copy(update={"reason": judgements[ConditionType.SPECULATION_EFFECTIVE].reason})


def _endpoint(snapshot: Snapshot) -> str:
    """Where clients reach the gateway: its Service's name, or this machine."""
    meta, port = snapshot.service.metadata, snapshot.service.spec.gateway.port
    host = "127.0.0.1" if snapshot.config.local else f"{gateway_name(meta.name)}.{meta.namespace}.svc"
    return f"http://{host}" if port == _HTTP_PORT else f"http://{host}:{port}"


def _scaling_history(
    snapshot: Snapshot, pools: Sequence[PoolState], scalers: Sequence[ScalerPlan]
) -> tuple[ScalingDecision, ...]:
    """The previous decisions with those of this pass before them. A pool's first size is no decision."""
    previous = snapshot.service.status
    before = {p.get("name"): p.get("desired") for p in previous.get("pools") or ()}
    external = {s.pool: s for s in scalers}
    new = [
        _scaling_decision(snapshot, pool, external.get(pool.pool), before=before[pool.pool])
        for pool in pools
        if before.get(pool.pool) not in (None, pool.desired)
    ]
    return tuple([*new, *_known_decisions(previous)][:MAX_SCALING_HISTORY])


def _scaling_decision(
    snapshot: Snapshot, pool: PoolState, scaler: ScalerPlan | None, *, before: int
) -> ScalingDecision:
    if scaler is None:
        reason, message = Reason.SPEC_CHANGED, f"spec.{pool.pool} asks for {pool.desired}"
    else:
        name = pool_scaler_name(snapshot.service.metadata.name, pool.pool)
        reason, message = scaling_reason(scaler), f"PoolScaler {name} asks for {scaler.asked}"
    return ScalingDecision(
        time=format_time(snapshot.now.timestamp()),
        pool=str(pool.pool),
        from_replicas=before,
        to_replicas=pool.desired,
        reason=reason,
        message=message,
    )


def _known_decisions(previous: Mapping[str, Any]) -> Iterator[ScalingDecision]:
    """The stored decisions. What another version wrote, and this one cannot read, is left out."""
    for decision in previous.get("scalingHistory") or ():
        try:
            yield ScalingDecision.model_validate(decision)
        except ValidationError:
            continue


def _columns(
    pools: Sequence[PoolState],
    *,
    latency: LatencyStatus,
    speculation: SpeculationStatus | None,
    kv_transfer: KvTransferStatus | None,
) -> Columns:
    """The cells of `kubectl get`; empty where there is nothing to say."""
    counts = {p.pool: f"{p.ready}/{p.desired}" for p in pools}
    acceptance = speculation.acceptance_percent if speculation is not None else None
    return Columns(
        prefill=counts.get(Pool.PREFILL, ""),
        decode=counts.get(Pool.DECODE, ""),
        ttft=_latency_cell(latency.time_to_first_token),
        tpot=_latency_cell(latency.time_per_output_token),
        acceptance="" if acceptance is None else f"{acceptance}%",
        speculation=str(speculation.state) if speculation is not None else "",
        draft=_short_name(speculation.draft) if speculation is not None else "",
        kv_fallbacks="" if kv_transfer is None else str(kv_transfer.fallbacks),
    )


def _latency_cell(observations: Sequence[LatencyObservation]) -> str:
    first = observations[0]
    observed = "" if first.observed_milliseconds is None else f"{first.observed_milliseconds}ms"
    if first.objective_milliseconds is None:
        return observed
    return f"{observed or '-'}/{first.objective_milliseconds}ms"


def _short_name(uri: str | None) -> str:
    return (uri or "").rstrip("/").rpartition("/")[2]
