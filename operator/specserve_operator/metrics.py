"""The operator's own metrics, in the exposition format of Prometheus."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specserve_operator.core.objects import Manifest

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

    def reconciled(self, result: str, seconds: float) -> None:
        """One reconcile has ended."""
        self._reconciled.labels(result).inc()
        self._duration.observe(seconds)

    def applied(self, kind: str, result: str) -> None:
        """One object was sent."""
        self._applied.labels(kind, result).inc()

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a number that is read when the metrics are."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def show_conditions(self, services: Callable[[], Iterable[Manifest]]) -> None:
        """Adds the conditions of all services."""
        self.registry.register(_Conditions(services))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _Conditions(Collector):
    """Read from the services when asked, so that a service that is gone leaves nothing behind."""

    def __init__(self, services: Callable[[], Iterable[Manifest]]) -> None:
        self._services = services

    def collect(self) -> Iterator[Any]:
        family = GaugeMetricFamily(
            "specserve_service_condition",
            "1 for the status that a condition of a service has.",
            labels=["namespace", "service", "type", "status"],
        )
        for service in self._services():
            meta = service["metadata"]
            for condition in (service.get("status") or {}).get("conditions") or ():
                family.add_metric([meta["namespace"], meta["name"], condition["type"], condition["status"]], 1)
        yield family
