"""The operator's own metrics, in the exposition format of Prometheus."""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specserve_operator.cluster.kube.cache import ObjectCache
from specserve_operator.cluster.kube.kinds import SERVICE
from specserve_operator.core.objects import ObjectRef

_DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class OperatorMetrics:
    """What reconciling does and how long it takes. One registry each, so that two may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconciled = Counter(
            "specserve_operator_reconcile",
            "Reconciles by result: ok, failed (the cluster refused or did not answer), error (a bug).",
            ["result"],
            registry=self.registry,
        )
        self._duration = Histogram(
            "specserve_operator_reconcile_duration_seconds",
            "How long one reconcile took.",
            buckets=_DURATIONS,
            registry=self.registry,
        )
        self._applied = Counter(
            "specserve_operator_apply",
            "Objects sent to the API server, by kind and result.",
            ["kind", "result"],
            registry=self.registry,
        )
        self._certified = Counter(
            "specserve_operator_certificates",
            "Pods' calls for a certificate by outcome: issued, or the gRPC status with which they were refused.",
            ["outcome"],
            registry=self.registry,
        )

    def reconciled(self, result: str, seconds: float) -> None:
        """One reconcile has ended."""
        self._reconciled.labels(result).inc()
        self._duration.observe(seconds)

    def applied(self, kind: str, result: str) -> None:
        """One object was sent."""
        self._applied.labels(kind, result).inc()

    def certified(self, outcome: str) -> None:
        """One pod has asked for a certificate."""
        self._certified.labels(outcome).inc()

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a number that is read when the metrics are."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def show_conditions(self, cache: ObjectCache) -> None:
        """Adds the conditions of all services in the cache."""
        self.registry.register(_Conditions(cache))

    async def render(self) -> bytes:
        """The text that Prometheus reads. Numbers are read at once; to write those of a thousand services takes long
        enough to do it in a thread."""
        return await asyncio.to_thread(generate_latest, _Collected(list(self.registry.collect())))


class _Collected(Collector):
    """What was read before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Conditions(Collector):
    """Read from the cache when asked, so that a service that is gone leaves nothing behind; each version once."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._known: dict[ObjectRef, tuple[int, tuple[tuple[str, str], ...]]] = {}

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "specserve_service_condition",
            "1 for the status that a condition of a service has.",
            labels=["namespace", "service", "type", "status"],
        )
        before, self._known = self._known, {}
        for ref in self._cache.refs(SERVICE):
            version = self._cache.version(ref)
            known = before.get(ref)
            self._known[ref] = known if known is not None and known[0] == version else (version, self._read(ref))
            for type_, status in self._known[ref][1]:
                family.add_metric([ref.namespace, ref.name, type_, status], 1)
        yield family

    def _read(self, ref: ObjectRef) -> tuple[tuple[str, str], ...]:
        status = (self._cache.get(ref) or {}).get("status") or {}
        return tuple((sys.intern(c["type"]), sys.intern(c["status"])) for c in status.get("conditions") or ())
