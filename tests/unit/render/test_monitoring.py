"""What the Prometheus operator is told: judged by the relabelling that Prometheus would do."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import plan
from specserve_operator.render import render
from tests.unit.core.builders import CONFIG, deployments_of, disaggregated, make_snapshot

MONITORED = replace(CONFIG, pod_monitors=True)


def objects() -> list[Manifest]:
    return render(plan(make_snapshot(disaggregated(), config=MONITORED)))


def monitor() -> Manifest:
    (found,) = (obj for obj in objects() if obj["kind"] == "PodMonitor")
    return found


def relabel(labels: dict[str, str], rules: list[Mapping[str, Any]]) -> dict[str, str] | None:
    """The labels that a target keeps; None where it is dropped."""
    for rule in rules:
        value = ";".join(labels.get(name, "") for name in rule["sourceLabels"])
        if rule["action"] == "drop" and re.fullmatch(rule["regex"], value):
            return None
        if rule["action"] == "replace":
            labels = {**labels, rule["targetLabel"]: value}
    return {name: value for name, value in labels.items() if not name.startswith("__")}


def targets() -> list[tuple[str, dict[str, str]]]:
    """Port and labels of everything that is scraped."""
    found = []
    spec = monitor()["spec"]
    for pool in ("prefill", "decode", "gateway"):
        (deployment,) = deployments_of(objects(), pool)
        template = deployment["spec"]["template"]
        own = template["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= own.items()
        discovered = {re.sub(r"\W", "_", f"__meta_kubernetes_pod_label_{k}"): v for k, v in own.items()}
        discovered["__meta_kubernetes_namespace"] = "llm"
        names = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        for endpoint in spec["podMetricsEndpoints"]:
            assert endpoint["path"] == "/metrics"
            labels = relabel(discovered, endpoint["relabelings"]) if endpoint["port"] in names else None
            if labels is not None:
                found.append((endpoint["port"], labels))
    return found


def test_every_series_says_of_which_namespace_service_and_pool_it_is() -> None:
    assert targets() == [
        ("http", {"namespace": "llm", "service": "coder", "pool": "prefill"}),
        ("http", {"namespace": "llm", "service": "coder", "pool": "decode"}),
        ("metrics", {"namespace": "llm", "service": "coder", "pool": "gateway"}),
    ]


def test_a_service_has_one_monitor_that_is_its_own() -> None:
    assert monitor()["metadata"]["name"] == "coder"
    assert monitor()["metadata"]["ownerReferences"][0]["name"] == "coder"


def test_without_the_prometheus_operator_there_is_no_monitor() -> None:
    assert not any(obj["kind"] == "PodMonitor" for obj in render(plan(make_snapshot(disaggregated()))))


def test_a_monitor_that_is_there_is_kept() -> None:
    assert plan(make_snapshot(disaggregated(), [monitor()], config=MONITORED)).deletions == ()
