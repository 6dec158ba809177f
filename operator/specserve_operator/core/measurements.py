"""The measured part of the status: latency, speculation and KV transfer, from the statistics of the decode pods.

Numbers are rounded so that they stay the same while nothing happens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from specserve_operator.api.conditions import ConditionType
from specserve_operator.api.status import (
    KvTransferStatus,
    LatencyObservation,
    LatencyStatus,
    SpeculationState,
    SpeculationStatus,
)
from specserve_operator.api.v1alpha1 import SpeculativeService, TimePerOutputToken, TimeToFirstToken
from specserve_operator.core.names import Pool
from specserve_operator.core.plan import Plan
from specserve_operator.core.runtime_state import POLICY_OFF
from specserve_operator.core.snapshot import Snapshot
from specserve_operator.core.stats import (
    Histogram,
    HistogramMismatchError,
    KvTransferStats,
    PoolStats,
    TransferTotals,
    merge_pool_stats,
)

# Shown where the spec has no objectives.
DEFAULT_PERCENTILE = 90

# Columns repeat what is elsewhere in the status.
_MEASURED_PARTS = frozenset({"latency", "kvTransfer", "columns"})
_MEASURED_OF_SPECULATION = frozenset({"acceptancePercent", "meanAcceptedLength", "speedup", "message"})
_MEASURED_CONDITIONS = frozenset(
    {
        ConditionType.KV_TRANSFER_READY,
        ConditionType.SPECULATION_EFFECTIVE,
        ConditionType.OBJECTIVES_MET,
        ConditionType.DRAFT_UP_TO_DATE,
    }
)

_Objective = TypeVar("_Objective", TimeToFirstToken, TimePerOutputToken)


def decode_stats(snapshot: Snapshot, plan: Plan) -> PoolStats:
    """The sum over decode pods.

    Those are the pods that clients talk to: latencies there are what users see. While old and new pods count in
    different buckets, only the current revision's count.
    """
    pods = [s for s in snapshot.pod_stats if s.pool == Pool.DECODE]
    try:
        return merge_pool_stats(pods)
    except HistogramMismatchError:
        decode = plan.pool(Pool.DECODE)
        current = decode.current.revision if decode else None
        return merge_pool_stats(s for s in pods if s.revision == current)


def compute_latency(service: SpeculativeService, stats: PoolStats, *, window_seconds: int) -> LatencyStatus:
    """Percentiles over the window, one for each objective, or a usual one where there are none."""
    objectives, requests = service.spec.objectives, stats.requests
    prompt_tokens = requests.prompt_tokens / requests.started if requests.started else 0.0
    return LatencyStatus(
        time_to_first_token=_observations(
            requests.time_to_first_token,
            objectives.time_to_first_token,
            bound_ms=lambda o: _first_token_bound_ms(o, prompt_tokens),
            window_seconds=window_seconds,
        ),
        time_per_output_token=_observations(
            requests.time_per_output_token,
            objectives.time_per_output_token,
            bound_ms=lambda o: o.milliseconds,
            window_seconds=window_seconds,
        ),
    )


def _first_token_bound_ms(objective: TimeToFirstToken, prompt_tokens: float) -> int:
    """The objective for prompts of the mean length, rounded as the observation is."""
    if objective.milliseconds_per_thousand_input_tokens == 0:
        return objective.milliseconds
    extra_ms = objective.milliseconds_per_thousand_input_tokens * prompt_tokens / 1000
    return round_significant(objective.milliseconds + extra_ms)


def _observations(
    histogram: Histogram,
    objectives: Sequence[_Objective],
    *,
    bound_ms: Callable[[_Objective], int],
    window_seconds: int,
) -> tuple[LatencyObservation, ...]:
    wanted: list[tuple[int, int | None]] = [(o.percentile, bound_ms(o)) for o in objectives]
    return tuple(
        LatencyObservation(
            percentile=percentile,
            observed_milliseconds=_rounded_percentile(histogram, percentile),
            objective_milliseconds=objective,
            samples=histogram.samples,
            window_seconds=window_seconds,
        )
        for percentile, objective in wanted or [(DEFAULT_PERCENTILE, None)]
    )


def _rounded_percentile(histogram: Histogram, percentile: int) -> int | None:
    value = histogram.percentile(percentile)
    return None if value is None else round_significant(value)


def round_significant(value: float, digits: int = 2) -> int:
    """To a whole number of at most `digits` digits that are not zero: 38.4 -> 38, 523.0 -> 520; never 0."""
    unit: int = 10 ** max(len(str(int(value))) - digits, 0)
    return max(round(value / unit) * unit, 1)


def compute_speculation(snapshot: Snapshot, stats: PoolStats) -> SpeculationStatus | None:
    """What the decode pods do; None without speculation in the spec. The reason is added with the conditions.

    While none of them answers, the last state that was seen stands: silence is no switch.
    """
    speculation = snapshot.service.spec.speculation
    if speculation is None:
        return None
    total = stats.speculation.total
    acceptance, length = total.acceptance_ratio, total.mean_accepted_length
    policies = policies_in_force(snapshot)
    state, policy = _last_state(snapshot.service.status)
    if policies:
        state = SpeculationState.ON if policies - {POLICY_OFF} else SpeculationState.OFF
        policy = ", ".join(sorted(policies))
    return SpeculationStatus(
        state=state,
        policy=policy,
        acceptance_percent=None if acceptance is None else round(100 * acceptance),
        mean_accepted_length=None if length is None else f"{length:.1f}",
        draft=speculation.draft.uri or str(speculation.draft.method),
    )


def _last_state(status: Mapping[str, Any]) -> tuple[SpeculationState, str | None]:
    """State and policy of a stored status; Off where there is none, or one that only another version knows."""
    stored = status.get("speculation") or {}
    try:
        return SpeculationState(stored.get("state", SpeculationState.OFF)), stored.get("policy")
    except ValueError:
        return SpeculationState.OFF, None


def policies_in_force(snapshot: Snapshot) -> set[str]:
    """Of the decode pods that answered; several while a change is on its way."""
    settings = [s.speculation.in_force for s in snapshot.pod_stats if s.pool == Pool.DECODE]
    return {s.policy for s in settings if s is not None}


def compute_kv_transfer(totals: TransferTotals, found: KvTransferStatus) -> KvTransferStatus:
    """What the decode pods loaded, and how often they had to prefill themselves, over the life of the service.

    `found`: the totals of earlier control planes. What pods had counted before this one began is in there already, or
    happened while none was running: which part is which cannot be told, so the larger number is taken. It is
    never too large, and after pods or containers were replaced too small by up to what was counted meanwhile.
    """

    def total(read: Callable[[KvTransferStats], int], known: int) -> int:
        inherited = read(totals.inherited)
        return max(known, inherited) + read(totals.counted) - inherited

    return KvTransferStatus(
        transfers=total(lambda s: s.remote_prefills, found.transfers),
        fallbacks=total(lambda s: s.fallback_count, found.fallbacks),
        bytes=total(lambda s: s.loaded_bytes, found.bytes),
        tokens=total(lambda s: s.loaded_tokens, found.tokens),
    )


def stored_kv_transfer(status: Mapping[str, Any]) -> KvTransferStatus:
    """The totals that a stored status has; 0 for what is not there, or no number."""
    stored = status.get("kvTransfer") or {}
    numbers = {name: stored.get(name) for name in KvTransferStatus.model_fields}
    return KvTransferStatus(**{name: n for name, n in numbers.items() if isinstance(n, int) and n >= 0})


def without_measurements(status: Mapping[str, Any]) -> dict[str, Any]:
    """What of a status is worth a write at once: everything but measured numbers, and texts that tell of them."""
    kept = {name: value for name, value in status.items() if name not in _MEASURED_PARTS}
    if "speculation" in kept:
        kept["speculation"] = {k: v for k, v in kept["speculation"].items() if k not in _MEASURED_OF_SPECULATION}
    if "conditions" in kept:
        kept["conditions"] = [_without_measured_message(condition) for condition in kept["conditions"]]
    return kept


def _without_measured_message(condition: Mapping[str, Any]) -> Mapping[str, Any]:
    if condition["type"] not in _MEASURED_CONDITIONS:
        return condition
    return {name: value for name, value in condition.items() if name != "message"}
