"""What pods report about themselves (`GetStats` in control.proto), as plain values, and sums over a pool.

All counters count from one start of one pod, or over one window of it: whoever fills `PodStats` decides, and the
functions here only add.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest


class HistogramMismatchError(ValueError):
    """Histograms of different bounds cannot be added: the pods run different versions."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts over fixed buckets. `counts` has one entry more than `upper_bounds_ms`: what lies above all bounds.

    A histogram without bounds is empty and adds to any other.
    """

    upper_bounds_ms: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    sum_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.upper_bounds_ms and len(self.counts) != len(self.upper_bounds_ms) + 1:
            raise ValueError(f"{len(self.upper_bounds_ms)} bounds need one count more, not {len(self.counts)}")

    @property
    def samples(self) -> int:
        return sum(self.counts)

    def merge(self, other: "Histogram") -> "Histogram":
        """The sum of both. Raises HistogramMismatchError."""
        if not other.upper_bounds_ms or not self.upper_bounds_ms:
            return self if self.upper_bounds_ms else other
        if self.upper_bounds_ms != other.upper_bounds_ms:
            raise HistogramMismatchError("histograms have different bounds")
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Histogram(self.upper_bounds_ms, counts, self.sum_ms + other.sum_ms)

    def percentile(self, percent: float) -> float | None:
        """The value in ms below which `percent` (0-100) of the samples lie; None without samples.

        Samples are taken as evenly spread in their bucket. Above the last bound the answer is that bound, which is
        then too low.
        """
        rank = self.samples * percent / 100
        seen, lower = 0, 0.0
        if not self.samples:
            return None
        for upper, count in zip(self.upper_bounds_ms, self.counts, strict=False):
            if count and seen + count >= rank:
                return lower + (upper - lower) * max(rank - seen, 0) / count
            seen, lower = seen + count, upper
        return lower


@dataclass(frozen=True, slots=True)
class RequestStats:
    """`running` is a gauge. `failed`: answered with a 5xx or cut; `refused`: answered with a 4xx."""

    started: int = 0
    succeeded: int = 0
    failed: int = 0
    refused: int = 0
    running: int = 0
    time_to_first_token: Histogram = Histogram()
    time_per_output_token: Histogram = Histogram()
    prompt_tokens: int = 0
    output_tokens: int = 0

    def merge(self, other: "RequestStats") -> "RequestStats":
        return RequestStats(
            started=self.started + other.started,
            succeeded=self.succeeded + other.succeeded,
            failed=self.failed + other.failed,
            refused=self.refused + other.refused,
            running=self.running + other.running,
            time_to_first_token=self.time_to_first_token.merge(other.time_to_first_token),
            time_per_output_token=self.time_per_output_token.merge(other.time_per_output_token),
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """What is in force in a pod; names as in the run-time state file."""

    policy: str = "Off"
    cap: str = "None"
    min_tokens: int = 0
    max_tokens: int = 0
    static_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Draft tokens under one policy. `verified_sequences` counts (sequence, step) pairs with a draft token or more."""

    verified_sequences: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    kld_sum_nats: float = 0.0
    kld_positions: int = 0

    @property
    def acceptance_ratio(self) -> float | None:
        """Accepted over drafted tokens, 0-1; None before anything was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens gained by one verification, the target's own included: 1.0 means that nothing was accepted."""
        return self.accepted_tokens / self.verified_sequences + 1 if self.verified_sequences else None

    def merge(self, other: "PolicyStats") -> "PolicyStats":
        return PolicyStats(
            verified_sequences=self.verified_sequences + other.verified_sequences,
            drafted_tokens=self.drafted_tokens + other.drafted_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
            drafted_by_position=_add(self.drafted_by_position, other.drafted_by_position),
            accepted_by_position=_add(self.accepted_by_position, other.accepted_by_position),
            kld_sum_nats=self.kld_sum_nats + other.kld_sum_nats,
            kld_positions=self.kld_positions + other.kld_positions,
        )


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """`by_policy` holds (policy name, stats) of every policy that has run; `in_force` is None over several pods."""

    in_force: SpeculationSettings | None = None
    generation: int = 0
    started_max_tokens: int = 0
    by_policy: tuple[tuple[str, PolicyStats], ...] = ()
    refilled_sequences: int = 0
    refilled_tokens: int = 0
    draft_forwards: int = 0
    steps_without_draft: int = 0

    @property
    def total(self) -> PolicyStats:
        """The sum over all policies."""
        return _sum_policies(stats for _, stats in self.by_policy)

    def merge(self, other: "SpeculationStats") -> "SpeculationStats":
        """Settings stay where both agree; generation and started maximum are the lower ones: what all can do."""
        names = sorted({name for name, _ in self.by_policy + other.by_policy})
        return SpeculationStats(
            in_force=self.in_force if self.in_force == other.in_force else None,
            generation=min(self.generation, other.generation),
            started_max_tokens=min(self.started_max_tokens, other.started_max_tokens),
            by_policy=tuple(
                (name, _sum_policies(s for n, s in self.by_policy + other.by_policy if n == name)) for name in names
            ),
            refilled_sequences=self.refilled_sequences + other.refilled_sequences,
            refilled_tokens=self.refilled_tokens + other.refilled_tokens,
            draft_forwards=self.draft_forwards + other.draft_forwards,
            steps_without_draft=self.steps_without_draft + other.steps_without_draft,
        )


@dataclass(frozen=True, slots=True)
class KvTransferStats:
    """Consumer side: `remote_prefills`, `loaded_*`, `fallbacks` as (cause, count). The rest is the producer's."""

    remote_prefills: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    fallbacks: tuple[tuple[str, int], ...] = ()
    served_transfers: int = 0
    served_bytes: int = 0
    open_leases: int = 0
    expired_leases: int = 0

    @property
    def fallback_count(self) -> int:
        return sum(count for _, count in self.fallbacks)

    @property
    def fallback_causes(self) -> str:
        """In words: `connect 2, stalled 1`."""
        return ", ".join(f"{cause} {count}" for cause, count in sorted(self.fallbacks) if count) or "cause unknown"

    def merge(self, other: "KvTransferStats") -> "KvTransferStats":
        causes = sorted({cause for cause, _ in self.fallbacks + other.fallbacks})
        return KvTransferStats(
            remote_prefills=self.remote_prefills + other.remote_prefills,
            loaded_tokens=self.loaded_tokens + other.loaded_tokens,
            loaded_bytes=self.loaded_bytes + other.loaded_bytes,
            fallbacks=tuple(
                (cause, sum(n for c, n in self.fallbacks + other.fallbacks if c == cause)) for cause in causes
            ),
            served_transfers=self.served_transfers + other.served_transfers,
            served_bytes=self.served_bytes + other.served_bytes,
            open_leases=self.open_leases + other.open_leases,
            expired_leases=self.expired_leases + other.expired_leases,
        )


NO_TRANSFERS = KvTransferStats()


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """What all pods have counted that one control plane has heard of, those that are silent or gone included.

    `inherited` is the part of `counted` that pods older than the control plane had counted when they first answered it.
    An earlier control plane may have written it, or some of it, into a status.
    """

    counted: KvTransferStats = NO_TRANSFERS
    inherited: KvTransferStats = NO_TRANSFERS

    def merge(self, other: "TransferTotals") -> "TransferTotals":
        return TransferTotals(self.counted.merge(other.counted), self.inherited.merge(other.inherited))


@dataclass(frozen=True, slots=True)
class PodStats:
    """The answer of one pod to `GetStats`. `pool` is `prefill` or `decode`."""

    pod_name: str
    pod_uid: str
    pool: str
    revision: str
    uptime_seconds: float = 0.0
    draining: bool = False
    requests: RequestStats = RequestStats()
    speculation: SpeculationStats = SpeculationStats()
    kv_transfer: KvTransferStats = KvTransferStats()


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Sums over the pods of a pool that answered."""

    pods: int = 0
    requests: RequestStats = RequestStats()
    speculation: SpeculationStats = SpeculationStats()
    kv_transfer: KvTransferStats = KvTransferStats()


def merge_pool_stats(pods: Iterable[PodStats]) -> PoolStats:
    """Adds pods up; of no pods, all is zero. Raises HistogramMismatchError."""
    merged = PoolStats()
    for pod in pods:
        merged = PoolStats(
            pods=merged.pods + 1,
            requests=merged.requests.merge(pod.requests),
            speculation=merged.speculation.merge(pod.speculation) if merged.pods else pod.speculation,
            kv_transfer=merged.kv_transfer.merge(pod.kv_transfer),
        )
    return merged


def _sum_policies(stats: Iterable[PolicyStats]) -> PolicyStats:
    total = PolicyStats()
    for one in stats:
        total = total.merge(one)
    return total


def _add(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
