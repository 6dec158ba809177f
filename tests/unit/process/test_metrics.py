"""What Prometheus reads of the operator."""

from typing import Any

import pytest

from specserve_operator.cluster.kube.cache import ObjectCache
from specserve_operator.cluster.kube.kinds import SERVICE
from specserve_operator.core.objects import Manifest
from specserve_operator.metrics import OperatorMetrics


def service(name: str, version: int, **statuses: str) -> Manifest:
    conditions = [{"type": type_, "status": status} for type_, status in statuses.items()]
    meta = {"name": name, "namespace": "llm", "resourceVersion": str(version)}
    return {"metadata": meta, "status": {"conditions": conditions}}


async def conditions(metrics: OperatorMetrics) -> list[str]:
    text = (await metrics.render()).decode()
    return [line for line in text.splitlines() if line.startswith("specserve_service_condition")]


def line(name: str, type_: str, status: str) -> str:
    labels = f'namespace="llm",service="{name}",status="{status}",type="{type_}"'
    return f"specserve_service_condition{{{labels}}} 1.0"


async def test_conditions_of_all_services_are_those_of_now() -> None:
    metrics, cache = OperatorMetrics(), ObjectCache()
    metrics.show_conditions(cache)
    assert await conditions(metrics) == []
    cache.put(SERVICE, service("a", 1, Ready="True", Progressing="False"))
    cache.put(SERVICE, service("b", 2, Ready="Unknown"))
    assert await conditions(metrics) == [
        line("a", "Ready", "True"),
        line("a", "Progressing", "False"),
        line("b", "Ready", "Unknown"),
    ]
    cache.put(SERVICE, service("a", 3, Ready="False"))
    cache.discard(SERVICE, service("b", 4))
    assert await conditions(metrics) == [line("a", "Ready", "False")]


async def test_a_service_that_has_not_changed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, cache = OperatorMetrics(), ObjectCache()
    metrics.show_conditions(cache)
    cache.put(SERVICE, service("a", 1, Ready="True"))
    first = await conditions(metrics)

    def get(*_: Any) -> None:
        pytest.fail("it was read")

    monkeypatch.setattr(cache, "get", get)
    assert await conditions(metrics) == first
