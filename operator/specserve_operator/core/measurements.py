"""The measured part of the status: latency, speculation and KV transfer, from the statistics of the decode pods.

Numbers are rounded so that they stay the same while nothing happens.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

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
    merge_pool_stats,
)

# Shown where the spec has no objectives.
DEFAULT_PERCENTILE = 90

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
    """What the decode pods do; None without speculation in the spec. The reason is added with the conditions."""
    speculation = snapshot.service.spec.speculation
    if speculation is None:
        return None
    total = stats.speculation.total
    acceptance, length = total.acceptance_ratio, total.mean_accepted_length
    policies = policies_in_force(snapshot)
    return SpeculationStatus(
        state=SpeculationState.ON if policies - {POLICY_OFF} else SpeculationState.OFF,
        policy=", ".join(sorted(policies)) or None,
        acceptance_percent=None if acceptance is None else round(100 * acceptance),
        mean_accepted_length=None if length is None else f"{length:.1f}",
        draft=speculation.draft.uri or str(speculation.draft.method),
    )


def policies_in_force(snapshot: Snapshot) -> set[str]:
    """Of the decode pods that answered; several while a change is on its way."""
    settings = [s.speculation.in_force for s in snapshot.pod_stats if s.pool == Pool.DECODE]
    return {s.policy for s in settings if s is not None}


def compute_kv_transfer(transfer: KvTransferStats) -> KvTransferStatus:
    """What the decode pods loaded, and how often they had to prefill themselves."""
    return KvTransferStatus(
        transfers=transfer.remote_prefills,
        fallbacks=transfer.fallback_count,
        bytes=transfer.loaded_bytes,
        tokens=transfer.loaded_tokens,
    )
