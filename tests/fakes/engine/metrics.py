"""The `vllm:*` metrics of an engine that dashboards, scalers and routers read, under their real names."""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, Protocol

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tests.fakes.engine.drafting import Drafting
from tests.fakes.engine.stand_ins import IterationStats, prometheus_registry

_LABELS: Final = ("model_name", "engine")
_FIRST_TOKEN_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_OUTPUT_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BUCKETS: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)


class Engine(Protocol):
    waiting: int
    running: int
    drafting: Drafting

    @property
    def kv_cache_usage_ratio(self) -> float: ...


class EngineMetrics(Collector):
    """Counts what the engine records; gauges and drafts are read from it at the moment of a scrape."""

    def __init__(self, args: argparse.Namespace, *, engine: Engine) -> None:
        self._engine = engine
        self._values = (args.served_model_name, "0")
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        registry = prometheus_registry()
        self._first_token, self._output_token, self._request = (
            Histogram(name, text, _LABELS, registry=registry, buckets=buckets).labels(*self._values)
            for name, text, buckets in (
                ("vllm:time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_BUCKETS),
                ("vllm:request_time_per_output_token_seconds", "Time per output token.", _OUTPUT_TOKEN_BUCKETS),
                ("vllm:e2e_request_latency_seconds", "Time of a whole request.", _REQUEST_BUCKETS),
            )
        )
        registry.register(self)

    def record(self, stats: IterationStats) -> None:
        self._counts["prompt_tokens"] += stats.num_prompt_tokens
        self._counts["generation_tokens"] += stats.num_generation_tokens

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def count_finished(self, reason: str) -> None:
        self._finished[reason] += 1

    def observe_finished(self, output_token_seconds: float, request_seconds: float) -> None:
        self._output_token.observe(output_token_seconds)
        self._request.observe(request_seconds)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        for name, value in (
            ("num_requests_running", engine.running),
            ("num_requests_waiting", engine.waiting),
            ("kv_cache_usage_perc", engine.kv_cache_usage_ratio),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", name, labels=_LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        for name in ("prompt_tokens", "generation_tokens"):
            yield self._counter(name, self._counts[name])
        finished = CounterMetricFamily("vllm:request_success", "request_success", labels=(*_LABELS, "finished_reason"))
        for reason in ("stop", "length", "abort"):
            finished.add_metric((*self._values, reason), self._finished[reason])
        yield finished
        if engine.drafting.started_max_tokens:
            yield from self._drafts(engine.drafting.stats()["by_policy"])

    def _drafts(self, policies: list[dict[str, Any]]) -> Iterator[Metric]:
        for name, key in (
            ("spec_decode_num_drafts", "verified_sequences"),
            ("spec_decode_num_draft_tokens", "drafted_tokens"),
            ("spec_decode_num_accepted_tokens", "accepted_tokens"),
        ):
            yield self._counter(name, sum(entry[key] for entry in policies))

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", name, labels=_LABELS)
        family.add_metric(self._values, value)
        return family
