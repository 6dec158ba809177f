"""What each condition says, and why. Types and reasons are described in api/conditions.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from specserve_operator.api.conditions import ConditionType, Reason
from specserve_operator.api.status import ConditionStatus, KvTransferStatus, LatencyStatus
from specserve_operator.api.v1alpha1 import SpeculationMode
from specserve_operator.core.names import ANNOTATION_UPGRADE, Pool, gateway_name
from specserve_operator.core.objects import ApplyFailure, Manifest
from specserve_operator.core.pinning import Resolution, Resolved
from specserve_operator.core.pools import PoolState
from specserve_operator.core.progress import deadline_seconds
from specserve_operator.core.snapshot import Snapshot
from specserve_operator.core.stats import KvTransferStats, PolicyStats, PoolStats

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN

# Fewer requests in the window say nothing about a high percentile.
MIN_LATENCY_SAMPLES = 20
# Fewer draft tokens say nothing about acceptance.
MIN_DRAFTED_TOKENS = 200
# Below this share a draft costs more than it brings, whatever the load.
MIN_ACCEPTANCE_RATIO = 0.15
# Reasons that follow from what pods have told.
_MEASURED = {
    *(Reason.TRANSFERRING, Reason.TRANSFER_FAILING, Reason.NO_TRAFFIC, Reason.TOO_FEW_SAMPLES),
    *(Reason.MODE_ALWAYS, Reason.DRAFTS_ACCEPTED, Reason.LOW_ACCEPTANCE),
    *(Reason.OBJECTIVES_MET, Reason.OBJECTIVE_MISSED, Reason.METRICS_STALE),
}
# On the status of a Service, written where Services are listeners of this machine.
CONDITION_LISTENING = "Listening"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A condition without its times."""

    status: ConditionStatus
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True)
class PreviousCondition:
    """What the last written status says of a condition. Its reason is text: an older version may have written it."""

    status: str
    reason: str
    message: str
    transition: datetime | None

    def as_judgement(self) -> Judgement | None:
        """The same again; None where this version does not know the reason."""
        try:
            return Judgement(ConditionStatus(self.status), Reason(self.reason), self.message)
        except ValueError:
            return None


def previous_condition(status: Mapping[str, Any], type_: ConditionType) -> PreviousCondition | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == type_:
            time = condition.get("lastTransitionTime")
            return PreviousCondition(
                status=condition.get("status", UNKNOWN),
                reason=condition.get("reason", ""),
                message=condition.get("message", ""),
                transition=datetime.fromisoformat(time) if time else None,
            )
    return None


def judge_ready(pools: Sequence[PoolState], failures: Sequence[ApplyFailure], gateway: Judgement) -> Judgement:
    """All objects are applied and all pools exactly as wanted. The reason of the first that is not is the service's.

    `gateway` counts where clients cannot reach ready pods: a missing or dead Service.
    """
    if failures:
        return _judge_failures(failures)
    decode = next(p for p in pools if p.pool is Pool.DECODE)
    if decode.desired == 0:
        return Judgement(FALSE, Reason.SCALED_TO_ZERO, "no decode pods are wanted, so no request is served")
    for pool in pools:
        if not pool.is_complete:
            status = UNKNOWN if pool.is_pending else FALSE
            return Judgement(status, pool.reason, f"{pool.pool}: {pool.message}")
    if gateway.status is not TRUE:
        return Judgement(gateway.status, gateway.reason, f"{Pool.GATEWAY}: {gateway.message}")
    return Judgement(TRUE, Reason.ALL_POOLS_READY, "every pool has its wanted pods, and all are ready")


def judge_pool(pool: PoolState | None) -> Judgement:
    """A serving pool: all wanted pods are ready at the wanted revision."""
    if pool is None:
        return Judgement(TRUE, Reason.NOT_CONFIGURED, "the spec has no such pool")
    if pool.is_complete:
        return Judgement(TRUE, pool.reason, pool.message)
    return Judgement(UNKNOWN if pool.is_pending else FALSE, pool.reason, pool.message)


def judge_gateway(snapshot: Snapshot, pool: PoolState, failures: Sequence[ApplyFailure]) -> Judgement:
    """One ready pod is enough to reach the service; a gateway pod is ready while it has a healthy decode pod.

    Clients come through its Service: one that could not be applied, or whose port nobody listens on, makes the
    pods useless.
    """
    name = gateway_name(snapshot.service.metadata.name)
    refused = [f for f in failures if (f.ref.kind, f.ref.name) == ("Service", name)]
    if refused:
        return _judge_failures(refused)
    deaf = _why_not_listening(snapshot.others, name)
    if deaf is not None:
        return Judgement(FALSE, Reason.PORT_UNAVAILABLE, deaf)
    if pool.ready:
        return Judgement(TRUE, Reason.PODS_READY, f"{pool.ready} of {pool.desired} pods are ready")
    return judge_pool(pool)


def _judge_failures(failures: Sequence[ApplyFailure]) -> Judgement:
    texts = (f.message if f.ref.name in f.message else f"{f.ref.kind} {f.ref.name}: {f.message}" for f in failures)
    return Judgement(FALSE, Reason.APPLY_FAILED, "; ".join(texts))


def _why_not_listening(objects: Sequence[Manifest], service_name: str) -> str | None:
    """The message of the condition `Listening`, which a Service has only while its port cannot be listened on."""
    for obj in objects:
        if (obj["kind"], obj["metadata"]["name"]) == ("Service", service_name):
            for condition in (obj.get("status") or {}).get("conditions") or ():
                if condition.get("type") == CONDITION_LISTENING and condition.get("status") == FALSE:
                    return str(condition.get("message", "its port cannot be listened on"))
    return None


def judge_progress(snapshot: Snapshot, pools: Sequence[PoolState], previous: PreviousCondition | None) -> Judgement:
    """A rollout ends when every pool is as wanted; after that, pods that fail or are scaled are no rollout."""
    complete = Judgement(FALSE, Reason.ROLLOUT_COMPLETE, "every pool runs its wanted revision")
    if all(p.is_complete and not p.updated_young for p in pools):
        return complete
    known = {p.get("name"): p.get("revision") for p in snapshot.service.status.get("pools") or ()}
    same_revisions = known == {str(p.pool): p.revision for p in pools}
    if previous is not None and previous.reason == Reason.ROLLOUT_COMPLETE and same_revisions:
        return complete
    since = previous.transition if previous is not None and previous.status == TRUE else None
    if not same_revisions:
        since = snapshot.now  # it begins with this pass, however old the children are
    unfinished = [p for p in pools if not p.is_complete or p.updated_young]
    for pool in unfinished:
        if not pool.is_pending and deadline_seconds(snapshot, pool.pool, since=since) <= 0:
            limit = snapshot.service.spec.rollout.progress_deadline_seconds
            text = f"{pool.pool}: no progress for {limit} s; {pool.message}"
            return Judgement(FALSE, Reason.ROLLOUT_STALLED, text)
    least_seconds = snapshot.service.spec.rollout.min_ready_seconds
    return Judgement(TRUE, Reason.ROLLOUT_IN_PROGRESS, "; ".join(_count(p, least_seconds) for p in unfinished))


def _count(pool: PoolState, least_seconds: int) -> str:
    young = f", {pool.updated_young} for less than {least_seconds} s" if pool.updated_young else ""
    return f"{pool.pool}: {pool.updated_ready} of {pool.desired} pods updated and ready{young}"


def judge_kv_transfer(
    snapshot: Snapshot, stats: PoolStats, now: KvTransferStatus, previous: PreviousCondition | None
) -> Judgement:
    """Whether KV caches moved since the status was last written; without traffic the last word stands.

    Where that was lost, or never was, old transfers show that the path works; old fallbacks are no failure of now.
    """
    if snapshot.service.spec.prefill is None:
        return Judgement(TRUE, Reason.NOT_CONFIGURED, "served aggregated: the spec has no prefill pool")
    if not any(p.is_serving for p in snapshot.pool_pods(Pool.PREFILL)):
        is_first = previous is None or previous.status == UNKNOWN
        text = "no prefill pod is ready: decode pods prefill for themselves"
        return Judgement(UNKNOWN if is_first else FALSE, Reason.NO_PREFILL_PEERS, text)
    if not stats.pods:
        return _without_stats(snapshot, previous)
    before, counted = snapshot.service.status.get("kvTransfer"), snapshot.kv_transfer.counted
    if before is not None:
        moved = _growth(now.transfers, before.get("transfers", 0))
        fell_back = _growth(now.fallbacks, before.get("fallbacks", 0))
        if moved or fell_back:
            return _judge_transfers(moved, fell_back, counted)
    last = previous.as_judgement() if previous is not None else None
    if last is not None and last.reason in {Reason.TRANSFERRING, Reason.TRANSFER_FAILING}:
        return last
    return _judge_transfers(counted.remote_prefills, 0, counted)


def _judge_transfers(moved: int, fell_back: int, totals: KvTransferStats) -> Judgement:
    """One transfer that loaded tokens shows that the path works, whatever else fell back."""
    if moved and totals.loaded_tokens:
        return Judgement(TRUE, Reason.TRANSFERRING, "decode pods load KV caches from prefill pods")
    if fell_back:
        text = f"decode pods prefill for themselves ({totals.fallback_causes})"
        return Judgement(FALSE, Reason.TRANSFER_FAILING, text)
    return Judgement(UNKNOWN, Reason.NO_TRAFFIC, "no prompt has been prefilled remotely since the operator started")


def _growth(now: int, before: int) -> int:
    """What was added to a total. It shrinks only where somebody else has written the status."""
    return max(now - before, 0)


def judge_speculation(snapshot: Snapshot, stats: PoolStats, previous: PreviousCondition | None) -> Judgement:
    """Whether drafts are accepted. The speed-up itself is not measured in this version, and the message says so."""
    speculation = snapshot.service.spec.speculation
    if speculation is None:
        return Judgement(TRUE, Reason.NOT_CONFIGURED, "the spec has no speculation")
    if speculation.mode is SpeculationMode.NEVER:
        return Judgement(FALSE, Reason.MODE_NEVER, "spec.speculation.mode is Never")
    if speculation.rollout_percent == 0:
        return Judgement(FALSE, Reason.MODE_NEVER, "spec.speculation.rolloutPercent is 0")
    if not stats.pods:
        return _without_stats(snapshot, previous)
    return _judge_acceptance(stats.speculation.total, speculation.mode)


def _judge_acceptance(total: PolicyStats, mode: SpeculationMode) -> Judgement:
    acceptance, length = total.acceptance_ratio, total.mean_accepted_length
    if acceptance is None or length is None:
        return Judgement(UNKNOWN, Reason.NO_TRAFFIC, "no draft token has been verified yet")
    numbers = f"{100 * acceptance:.0f}% of draft tokens are accepted, {length:.1f} tokens per verification"
    if total.drafted_tokens < MIN_DRAFTED_TOKENS:
        return Judgement(UNKNOWN, Reason.TOO_FEW_SAMPLES, numbers)
    if acceptance < MIN_ACCEPTANCE_RATIO:
        return Judgement(FALSE, Reason.LOW_ACCEPTANCE, numbers)
    reason = Reason.MODE_ALWAYS if mode is SpeculationMode.ALWAYS else Reason.DRAFTS_ACCEPTED
    return Judgement(TRUE, reason, f"{numbers}; the speed-up over the target alone is not measured")


def judge_objectives(
    snapshot: Snapshot, stats: PoolStats, latency: LatencyStatus, previous: PreviousCondition | None
) -> Judgement:
    """Every objective against its percentile, with the numbers that are shown."""
    objectives = snapshot.service.spec.objectives
    if not objectives.time_to_first_token and not objectives.time_per_output_token:
        return Judgement(TRUE, Reason.NOT_CONFIGURED, "the spec has no objectives")
    if not stats.pods:
        return _without_stats(snapshot, previous)
    named = [("TTFT", o) for o in latency.time_to_first_token] + [("TPOT", o) for o in latency.time_per_output_token]
    measured = [(name, o) for name, o in named if o.objective_milliseconds is not None]
    if not all(o.samples for _, o in measured):
        return Judgement(UNKNOWN, Reason.NO_TRAFFIC, "no requests in the window")
    if any(o.samples < MIN_LATENCY_SAMPLES for _, o in measured):
        return Judgement(UNKNOWN, Reason.TOO_FEW_SAMPLES, f"fewer than {MIN_LATENCY_SAMPLES} requests in the window")
    missed = [
        f"{name} p{o.percentile} is {o.observed_milliseconds} ms, the objective {o.objective_milliseconds} ms"
        for name, o in measured
        if (o.observed_milliseconds or 0) > (o.objective_milliseconds or 0)
    ]
    if missed:
        return Judgement(FALSE, Reason.OBJECTIVE_MISSED, "; ".join(missed))
    return Judgement(TRUE, Reason.OBJECTIVES_MET, "every objective is met")


def judge_upgrade(snapshot: Snapshot, resolution: Resolution) -> Judgement:
    """What would restart, and into what, if the user asked for the upgrade. CRDs that lack fields come first."""
    if snapshot.crd_problem:
        return Judgement(TRUE, Reason.CRD_OUTDATED, snapshot.crd_problem)
    outdated = [r for r in resolution.pools if r.newer_image is not None]
    if not outdated:
        return Judgement(FALSE, Reason.UP_TO_DATE, "an upgrade would restart no pods")
    by_change: dict[str, list[str]] = {}
    for resolved in outdated:
        change = _upgrade_change(resolved, snapshot.config.operator_version)
        by_change.setdefault(change, []).append(str(resolved.pool))
    changes = "; ".join(f"{', '.join(pools)} would restart: {change}" for change, pools in by_change.items())
    return Judgement(
        TRUE, Reason.NEWER_REVISION, f"{changes}. To take it, set the annotation {ANNOTATION_UPGRADE} to a new value"
    )


def _upgrade_change(resolved: Resolved, operator_version: str) -> str:
    if resolved.image != resolved.newer_image:
        return f"image {resolved.image} -> {resolved.newer_image}"
    return f"image {resolved.image} stays, the pod template would be that of operator {operator_version}"


def _without_stats(snapshot: Snapshot, previous: PreviousCondition | None) -> Judgement:
    """What an earlier control plane has measured stands until this one has asked: its start changes nothing."""
    if not any(p.is_serving for p in snapshot.pool_pods(Pool.DECODE)):
        return Judgement(UNKNOWN, Reason.PENDING, "no decode pod is ready")
    last = previous.as_judgement() if previous is not None else None
    is_of_this_spec = snapshot.service.status.get("observedGeneration") == snapshot.service.metadata.generation
    if not snapshot.are_pods_asked and is_of_this_spec and last is not None and last.reason in _MEASURED:
        return last
    return Judgement(UNKNOWN, Reason.METRICS_STALE, "no decode pod answers with statistics")
