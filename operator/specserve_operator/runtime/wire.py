"""Between `control.proto` and the core's values: the only place that knows both. Pure."""

import functools
import json
from dataclasses import dataclass
from typing import Any

from specserve_operator.core.runtime_state import is_generation
from specserve_operator.core.stats import (
    Histogram,
    KvTransferStats,
    PodStats,
    PolicyStats,
    RequestStats,
    SpeculationSettings,
    SpeculationStats,
)
from specserve_protos.v1alpha1 import control_pb2

_POLICIES = {
    control_pb2.LENGTH_POLICY_OFF: "Off",
    control_pb2.LENGTH_POLICY_STATIC: "Static",
    control_pb2.LENGTH_POLICY_DSDE: "DSDE",
}
_CAPS = {control_pb2.BATCH_CAP_NONE: "None", control_pb2.BATCH_CAP_MEAN: "Mean"}
_POLICY_VALUES = {name: value for value, name in _POLICIES.items()}
_CAP_VALUES = {name: value for value, name in _CAPS.items()}


class UnknownSettingError(ValueError):
    """A policy or cap that the protocol cannot carry."""


@dataclass(frozen=True, slots=True)
class DesiredSpeculation:
    """What the run-time state file asks of a pod."""

    generation: int
    settings: SpeculationSettings


def parse_state_file(text: str) -> DesiredSpeculation:
    """The `state.json` of docs/contracts.md. Raises ValueError if it is none."""
    try:
        state = json.loads(text)
        speculation = state["speculation"]
        return DesiredSpeculation(
            generation=_generation(state["generation"]),
            settings=SpeculationSettings(
                policy=str(speculation["policy"]),
                cap=str(speculation["cap"]),
                min_tokens=int(speculation["minTokens"]),
                max_tokens=int(speculation["maxTokens"]),
                static_tokens=int(speculation["staticTokens"]),
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the run-time state has no {error}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"the run-time state is none: {error}") from error


def _generation(value: object) -> int:
    if not is_generation(value):
        raise ValueError(f"the run-time state's generation is {str(value)[:40]}")
    return value


def settings_request(desired: DesiredSpeculation) -> control_pb2.SetSpeculationRequest:
    """The message that hastens `desired`. Raises `UnknownSettingError`."""
    settings = desired.settings
    try:
        policy, cap = _POLICY_VALUES[settings.policy], _CAP_VALUES[settings.cap]
    except KeyError as error:
        raise UnknownSettingError(f"{error.args[0]} is not part of the control protocol") from error
    return control_pb2.SetSpeculationRequest(
        generation=desired.generation,
        settings=control_pb2.SpeculationSettings(
            policy=policy,
            cap=cap,
            min_tokens=settings.min_tokens,
            max_tokens=settings.max_tokens,
            static_tokens=settings.static_tokens,
        ),
    )


def pod_stats(answer: control_pb2.GetStatsResponse) -> PodStats:
    """The answer of one pod as values. Raises ValueError if its histograms contradict themselves."""
    return PodStats(
        pod_name=answer.pod_name,
        pod_uid=answer.pod_uid,
        pool=answer.pool,
        revision=answer.revision,
        uptime_seconds=answer.uptime_seconds,
        draining=answer.draining,
        requests=_requests(answer.requests),
        speculation=_speculation(answer.speculation),
        kv_transfer=_kv_transfer(answer.kv_transfer),
    )


def _requests(stats: control_pb2.RequestStats) -> RequestStats:
    return RequestStats(
        started=stats.started,
        succeeded=stats.succeeded,
        failed=stats.failed,
        refused=stats.refused,
        running=stats.running,
        time_to_first_token=_histogram(stats.time_to_first_token),
        time_per_output_token=_histogram(stats.time_per_output_token),
        prompt_tokens=stats.prompt_tokens,
        output_tokens=stats.output_tokens,
    )


def _histogram(histogram: control_pb2.Histogram) -> Histogram:
    return Histogram(_shared(tuple(histogram.upper_bounds_ms)), tuple(histogram.counts), histogram.sum_ms)


@functools.lru_cache(maxsize=16)
def _shared(bounds_ms: tuple[float, ...]) -> tuple[float, ...]:
    """The same tuple for the same bounds: every pod has them, and each has dozens of readings remembered."""
    return bounds_ms


def _speculation(stats: control_pb2.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        in_force=_settings(stats.in_force) if stats.HasField("in_force") else None,
        generation=stats.generation,
        started_max_tokens=stats.started_max_tokens,
        by_policy=tuple(sorted(((_policy(p.policy), _policy_stats(p)) for p in stats.by_policy), key=_name)),
        refilled_sequences=stats.refilled_sequences,
        refilled_tokens=stats.refilled_tokens,
        draft_forwards=stats.draft_forwards,
        steps_without_draft=stats.steps_without_draft,
    )


def _name(entry: tuple[str, PolicyStats]) -> str:
    return entry[0]


def _policy(value: Any) -> str:
    """The name of a policy; one that a newer pod reports is shown by its number."""
    return _POLICIES.get(value, f"Policy{int(value)}")


def _settings(settings: control_pb2.SpeculationSettings) -> SpeculationSettings:
    return SpeculationSettings(
        policy=_policy(settings.policy),
        cap=_CAPS.get(settings.cap, f"Cap{int(settings.cap)}"),
        min_tokens=settings.min_tokens,
        max_tokens=settings.max_tokens,
        static_tokens=settings.static_tokens,
    )


def _policy_stats(stats: control_pb2.PolicyStats) -> PolicyStats:
    return PolicyStats(
        verified_sequences=stats.verified_sequences,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        drafted_by_position=tuple(stats.drafted_by_position),
        accepted_by_position=tuple(stats.accepted_by_position),
        kld_sum_nats=stats.kld_sum_nats,
        kld_positions=stats.kld_positions,
    )


def _kv_transfer(stats: control_pb2.KvTransferStats) -> KvTransferStats:
    return KvTransferStats(
        remote_prefills=stats.remote_prefills,
        loaded_tokens=stats.loaded_tokens,
        loaded_bytes=stats.loaded_bytes,
        fallbacks=tuple(sorted((f.cause, f.count) for f in stats.fallbacks)),
        served_transfers=stats.served_transfers,
        served_bytes=stats.served_bytes,
        open_leases=stats.open_leases,
        expired_leases=stats.expired_leases,
    )
