"""What a pod has counted over all its starts, and lately: `GetStats` counts from one start of one process. Pure.

Two things a reader of the status expects are not in one answer: totals that do not fall when a container is
restarted, and latencies of the last minutes rather than of the pod's whole life.
"""

from collections import deque
from dataclasses import dataclass, replace

from specserve_operator.core.stats import Histogram, KvTransferStats, PodStats, RequestStats, SpeculationStats

# Latencies are remembered this often within the window: its edge is as coarse as this.
_SNAPSHOTS_PER_WINDOW = 30


@dataclass(frozen=True, slots=True)
class _Latencies:
    seconds: float
    time_to_first_token: Histogram
    time_per_output_token: Histogram


class PodHistory:
    """The answers of one pod (one uid), over restarts of its container."""

    def __init__(self, *, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._before: PodStats | None = None  # sum of the starts that are over
        self._last: PodStats | None = None
        self._past: deque[_Latencies] = deque()

    def add(self, answer: PodStats, now_seconds: float) -> PodStats:
        """Takes in one answer; returns it with counters over all starts and latencies of the window."""
        if self._last is not None and _is_new_start(self._last, answer):
            self._before = self._last if self._before is None else _sum(self._before, self._last)
        self._last = answer
        total = answer if self._before is None else _sum(self._before, answer)
        return replace(total, requests=self._windowed(total, now_seconds))

    def _windowed(self, total: PodStats, now_seconds: float) -> RequestStats:
        current = _Latencies(now_seconds, total.requests.time_to_first_token, total.requests.time_per_output_token)
        start = self._start_of_window(current, uptime_seconds=total.uptime_seconds)
        return replace(
            total.requests,
            time_to_first_token=subtract(current.time_to_first_token, start.time_to_first_token),
            time_per_output_token=subtract(current.time_per_output_token, start.time_per_output_token),
        )

    def _start_of_window(self, current: _Latencies, *, uptime_seconds: float) -> _Latencies:
        if not self._past:
            if uptime_seconds < self._window_seconds:
                # All that a young pod has counted lies within the window; of an old one nothing is known yet.
                self._past.append(_Latencies(current.seconds - uptime_seconds, Histogram(), Histogram()))
            self._past.append(current)
        elif current.seconds - self._past[-1].seconds >= self._window_seconds / _SNAPSHOTS_PER_WINDOW:
            self._past.append(current)
        edge = current.seconds - self._window_seconds
        while len(self._past) > 1 and self._past[1].seconds <= edge:
            self._past.popleft()
        return self._past[0]


def subtract(later: Histogram, earlier: Histogram) -> Histogram:
    """What was counted between two readings of one histogram; `later` itself if the bounds have changed."""
    if earlier.upper_bounds_ms != later.upper_bounds_ms:
        return later
    counts = tuple(max(a - b, 0) for a, b in zip(later.counts, earlier.counts, strict=True))
    return Histogram(later.upper_bounds_ms, counts, max(later.sum_ms - earlier.sum_ms, 0.0))


def _is_new_start(last: PodStats, answer: PodStats) -> bool:
    """True if the process was restarted in between: its clock, or a counter that only grows, went back."""
    return answer.uptime_seconds < last.uptime_seconds or answer.requests.started < last.requests.started


def _sum(before: PodStats, answer: PodStats) -> PodStats:
    """Counters of both; everything that describes the present (gauges, settings, identity) from `answer`."""
    requests = _mergeable(before.requests, answer.requests).merge(answer.requests)
    speculation = before.speculation.merge(answer.speculation)
    kv_transfer = before.kv_transfer.merge(answer.kv_transfer)
    return replace(
        answer,
        requests=replace(requests, running=answer.requests.running),
        speculation=_at_present(speculation, answer.speculation),
        kv_transfer=_without_old_leases(kv_transfer, answer.kv_transfer),
    )


def _mergeable(before: RequestStats, answer: RequestStats) -> RequestStats:
    """`before` without the histograms that a new version of the pod counts in other buckets."""

    def kept(old: Histogram, new: Histogram) -> Histogram:
        return old if old.upper_bounds_ms == new.upper_bounds_ms else Histogram()

    return replace(
        before,
        time_to_first_token=kept(before.time_to_first_token, answer.time_to_first_token),
        time_per_output_token=kept(before.time_per_output_token, answer.time_per_output_token),
    )


def _at_present(merged: SpeculationStats, answer: SpeculationStats) -> SpeculationStats:
    return replace(
        merged,
        in_force=answer.in_force,
        generation=answer.generation,
        started_max_tokens=answer.started_max_tokens,
    )


def _without_old_leases(merged: KvTransferStats, answer: KvTransferStats) -> KvTransferStats:
    return replace(merged, open_leases=answer.open_leases)
