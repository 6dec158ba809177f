"""The `specserve_worker_*` metrics, read from the pod's counters at the moment of a scrape."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve_workers.control.drain import DrainState
from specserve_workers.control.engine import EngineNumbers
from specserve_workers.control.service import all_fallbacks
from specserve_workers.control.stats import FallbackCause, LatencyHistogram, RequestOutcome, ServingStats
from specserve_workers.identity.keeper import IdentityStatus

# Every fourth bound: each about twice the one before.
_BOUNDS_STEP: Final = 4


class WorkerCollector(Collector):
    """Counts nothing itself, so that metrics and `GetStats` cannot disagree."""

    def __init__(
        self,
        *,
        pool: str,
        stats: ServingStats,
        numbers: EngineNumbers,
        drain: DrainState,
        identity: IdentityStatus | None = None,
    ) -> None:
        self._pool = pool
        self._stats = stats
        self._numbers = numbers
        self._drain = drain
        self._identity = identity

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._transfers()
        yield from self._drafts()
        if self._identity is not None:
            yield from self._certificates(self._identity)

    def describe(self) -> Iterator[Metric]:
        """No names in advance: registering must not ask the engine."""
        return iter(())

    def _requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "specserve_worker_requests", "Requests that ended, by outcome.", labels=("pool", "result")
        )
        for outcome in RequestOutcome:
            requests.add_metric((self._pool, outcome.value), self._stats.outcomes[outcome])
        yield requests
        yield self._gauge("requests_running", "Requests being answered.", self._stats.running)
        yield self._gauge("draining", "1 once the pod takes no new requests.", float(self._drain.draining))
        yield self._histogram(
            "time_to_first_token_seconds",
            "From arrival at this pod to the first content of a streamed answer, prefill call included.",
            self._stats.time_to_first_token,
        )
        yield self._histogram(
            "time_per_output_token_seconds",
            "Mean time per output token of finished sequences, after the first token.",
            self._stats.time_per_output_token,
        )
        yield self._histogram(
            "prefill_duration_seconds", "Successful calls to prefill pods.", self._stats.remote_prefill
        )

    def _transfers(self) -> Iterator[Metric]:
        fallbacks = CounterMetricFamily(
            "specserve_worker_prefill_fallbacks",
            "Prompts prefilled here that were meant for a prefill pod, by cause.",
            labels=("pool", "cause"),
        )
        counts = all_fallbacks(self._numbers.kv_transfer, self._stats)
        for cause in FallbackCause:
            fallbacks.add_metric((self._pool, cause.value), counts.get(cause.value, 0))
        yield fallbacks
        engine = self._numbers.kv_transfer
        size = CounterMetricFamily(
            "specserve_worker_kv_transfer_bytes", "KV cache bytes moved.", labels=("pool", "direction")
        )
        size.add_metric((self._pool, "loaded"), engine.get("loaded_bytes", 0))
        size.add_metric((self._pool, "served"), engine.get("served_bytes", 0))
        yield size
        yield self._counter("kv_loaded_tokens", "Prompt tokens loaded from a prefill pod.", engine, "loaded_tokens")
        yield self._counter("kv_expired_leases", "Prompts held until their lease ended.", engine, "expired_leases")
        yield self._gauge("kv_open_leases", "Prompts held for decode pods.", engine.get("open_leases", 0))

    def _drafts(self) -> Iterator[Metric]:
        for name, field, text in (
            ("draft_tokens", "drafted_tokens", "Draft tokens verified, by policy."),
            ("accepted_tokens", "accepted_tokens", "Draft tokens accepted, by policy."),
        ):
            family = CounterMetricFamily(f"specserve_worker_{name}", text, labels=("pool", "policy"))
            for entry in self._numbers.speculation.get("by_policy", ()):
                family.add_metric((self._pool, str(entry["policy"])), entry.get(field, 0))
            yield family

    def _certificates(self, identity: IdentityStatus) -> Iterator[Metric]:
        text = "When the pod's certificate expires, in seconds since the epoch; 0 while it has none."
        yield self._gauge("certificate_expiry_timestamp_seconds", text, identity.expires_at)
        calls = CounterMetricFamily(
            "specserve_worker_certificate_requests", "Tries to get a certificate.", labels=("pool", "result")
        )
        calls.add_metric((self._pool, "issued"), identity.renewals)
        calls.add_metric((self._pool, "failed"), identity.failures)
        yield calls

    def _counter(self, name: str, text: str, source: Mapping[str, Any], key: str) -> Metric:
        family = CounterMetricFamily(f"specserve_worker_{name}", text, labels=("pool",))
        family.add_metric((self._pool,), source.get(key, 0))
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"specserve_worker_{name}", text, labels=("pool",))
        family.add_metric((self._pool,), value)
        return family

    def _histogram(self, name: str, text: str, histogram: LatencyHistogram) -> Metric:
        family = HistogramMetricFamily(f"specserve_worker_{name}", text, labels=("pool",))
        buckets = [(f"{bound / 1000:g}", count) for bound, count in histogram.cumulative(every=_BOUNDS_STEP)]
        family.add_metric((self._pool,), [*buckets, ("+Inf", histogram.total)], histogram.sum_ms / 1000)
        return family
