"""What is installed for Prometheus and Grafana, and that every query in it can have an answer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve_operator.api.conditions import ConditionType
from specserve_workers.control.stats import RequestOutcome
from tests.chart.metric_names import TARGET_LABELS, known_metrics, named_labels, named_metrics, selected_values
from tests.chart.rendering import (
    CHART,
    PROMETHEUS_OPERATOR,
    Manifest,
    Release,
    of_kind,
    only,
    operator_container,
    render,
)

DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
RULES = CHART / "files" / "rules" / "specserve.yaml"
KNOWN = known_metrics()


def _alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def _panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def _variables(path: Path) -> list[dict[str, Any]]:
    return [v for v in json.loads(path.read_text())["templating"]["list"] if v["type"] == "query"]


def _queries() -> Iterator[tuple[str, str]]:
    """Every query of alerts and dashboards, with where it stands."""
    for alert in _alerts():
        yield alert["alert"], alert["expr"]
    for path in DASHBOARDS:
        for panel in _panels(path):
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


QUERIES = list(_queries())


@pytest.mark.parametrize(("place", "query"), QUERIES, ids=[place for place, _ in QUERIES])
def test_queries_name_only_metrics_and_labels_that_exist(place: str, query: str) -> None:
    metrics = named_metrics(query)
    assert metrics, place
    assert not metrics - set(KNOWN), place
    labels = TARGET_LABELS.union({"le"}, *(KNOWN[metric] for metric in metrics))
    assert not named_labels(query) - labels, place


def test_queries_ask_for_conditions_and_outcomes_that_exist() -> None:
    conditions, outcomes = set(), set()
    for _, query in QUERIES:
        conditions |= selected_values(query, "specserve_service_condition", "type")
        outcomes |= selected_values(query, "specserve_worker_requests_total", "result")
    assert conditions >= {"Ready", "KVTransferReady", "ObjectivesMet"}
    assert not conditions - set(ConditionType)
    assert outcomes == {"failed"} <= set(RequestOutcome)


@pytest.mark.parametrize(
    "metric",
    [
        "specserve_operator_reconcile_total",
        "specserve_operator_reconcile_duration_seconds_bucket",
        "specserve_operator_workqueue_depth",
        "specserve_operator_workqueue_oldest_key_age_seconds",
        "specserve_operator_watch_age_seconds",
        "specserve_operator_apply_total",
        "specserve_operator_certificates_total",
        "specserve_service_condition",
        "specserve_worker_time_to_first_token_seconds_bucket",
        "specserve_worker_time_per_output_token_seconds_bucket",
        "specserve_worker_accepted_tokens_total",
        "specserve_worker_kv_transfer_bytes_total",
        "specserve_worker_prefill_fallbacks_total",
    ],
)
def test_what_matters_is_shown(metric: str) -> None:
    shown = {
        name for path in DASHBOARDS for p in _panels(path) for t in p["targets"] for name in named_metrics(t["expr"])
    }
    assert metric in shown


def test_names_in_a_query_are_found() -> None:
    query = (
        'sum by (pod, le) (rate(a:b_total{x="y", z=~"b|c"}[5m])) / on (job) group_left (k) '
        'max(c{type!="sum(d)"}) > 0.5 or vector(0)'
    )
    assert named_metrics(query) == {"a:b_total", "c"}
    assert named_labels(query) == {"pod", "le", "x", "z", "job", "k", "type"}
    assert selected_values(query, "a:b_total", "z") == {"b", "c"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_complete(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"] == f"specserve-{path.stem}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for variable in _variables(path):
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert found is not None
        (metric,) = named_metrics(found.group(1))
        assert found.group(2) in KNOWN[metric] | TARGET_LABELS
    names = {variable["name"] for variable in _variables(path)} | {"__rate_interval", "datasource"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) <= names
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in _panels(path))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alerts_say_what_is_wrong_and_what_to_look_at() -> None:
    names = [alert["alert"] for alert in _alerts()]
    assert len(names) == len(set(names)) > 10
    for alert in _alerts():
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert set(alert["annotations"]) == {"summary", "description"}
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
        assert used <= named_labels(alert["expr"]), alert["alert"]


def _monitoring(objects: list[Manifest]) -> set[str]:
    kinds = {obj["kind"] for obj in objects if obj["apiVersion"].startswith("monitoring.")}
    return kinds | {"dashboards" for _ in of_kind(objects, "ConfigMap")}


ALL = {"ServiceMonitor", "PrometheusRule", "dashboards"}


@pytest.mark.parametrize(
    ("enabled", "apis", "expected"),
    [
        ("auto", (), set()),
        ("auto", PROMETHEUS_OPERATOR, ALL),
        (True, (), ALL),
        (False, PROMETHEUS_OPERATOR, set()),
    ],
)
def test_monitoring_follows_the_cluster_unless_it_is_told(
    enabled: Any, apis: tuple[str, ...], expected: set[str]
) -> None:
    options = {name: {"enabled": enabled} for name in ("serviceMonitor", "prometheusRule", "dashboards")}
    assert _monitoring(render(Release({"monitoring": options}, apis=apis))) == expected


def test_the_service_monitor_reads_the_metrics_of_the_operators_service() -> None:
    objects = render(Release(apis=PROMETHEUS_OPERATOR))
    spec, service = only(objects, "ServiceMonitor")["spec"], only(objects, "Service")
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert spec["namespaceSelector"] == {"matchNames": [service["metadata"]["namespace"]]}
    (endpoint,) = spec["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    targets = {port["targetPort"] for port in service["spec"]["ports"]}
    assert targets <= {port["name"] for port in operator_container(objects)["ports"]}
    # `namespace` and `service` of conditions would be renamed, and every query about services be empty.
    assert endpoint["honorLabels"] is True


def test_rules_and_dashboards_are_installed_as_they_are_in_the_files() -> None:
    objects = render(Release(apis=PROMETHEUS_OPERATOR))
    assert only(objects, "PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text())
    maps = of_kind(objects, "ConfigMap")
    installed = {key: json.loads(text) for obj in maps for key, text in obj["data"].items()}
    assert installed == {f"specserve-{path.name}": json.loads(path.read_text()) for path in DASHBOARDS}
    assert all(obj["metadata"]["labels"]["grafana_dashboard"] == "1" for obj in maps)
