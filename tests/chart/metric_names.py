"""The metrics that there are, with their labels, from the code that exports them; and those that a query names."""

import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.core import Metric

import specserve_operator
from specserve_operator.cluster.kube.cache import ObjectCache
from specserve_operator.cluster.kube.kinds import SERVICE
from specserve_operator.metrics import OperatorMetrics
from specserve_workers.control.drain import DrainState
from specserve_workers.control.metrics import WorkerCollector
from specserve_workers.control.stats import ServingStats

# What Prometheus itself adds to what it reads, as the chart's ServiceMonitor and the services' PodMonitors have it.
TARGET_LABELS = frozenset({"namespace", "service", "pool", "pod", "job"})
_ENGINE_LABELS = frozenset({"model_name", "engine"})
_SUFFIXES = {"_counter_cls": ("_total",), "_gauge_cls": ("",), "_histogram_cls": ("_bucket", "_sum", "_count")}

_WORDS = {"and", "or", "unless", "bool", "offset"}
_STRING = r'"[^"]*"'
_GROUPING = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"


def known_metrics() -> dict[str, frozenset[str]]:
    """Labels by the name of each series. Labels of the target are not among them."""
    return _operator_metrics() | _worker_metrics() | _engine_metrics()


def _operator_metrics() -> dict[str, frozenset[str]]:
    metrics = OperatorMetrics()
    metrics.reconciled("ok", 0.1)
    metrics.applied("Pod", "created")
    metrics.certified("issued")
    cache = ObjectCache()
    meta = {"namespace": "n", "name": "s", "resourceVersion": "1"}
    cache.put(SERVICE, {"metadata": meta, "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    metrics.show_conditions(cache)
    return _series(metrics.registry.collect()) | dict.fromkeys(_operator_gauges(), frozenset[str]())


def _operator_gauges() -> set[str]:
    """Gauges are named where the process is put together."""
    assert specserve_operator.__file__ is not None
    source = (Path(specserve_operator.__file__).parent / "app.py").read_text()
    return {text for text in _texts(ast.parse(source)) if re.fullmatch(r"specserve_operator_\w+", text)}


class _Numbers:
    """An engine that has speculated."""

    speculation: Mapping[str, object] = {"by_policy": [{"policy": "DSDE"}]}
    kv_transfer: Mapping[str, object] = {}


def _worker_metrics() -> dict[str, frozenset[str]]:
    collector = WorkerCollector(pool="decode", stats=ServingStats(), numbers=_Numbers(), drain=DrainState())  # type: ignore[arg-type]
    return _series(collector.collect())


def _engine_metrics() -> dict[str, frozenset[str]]:
    """Read from the engine's source: importing it takes longer than all tests of the chart."""
    engine = importlib.util.find_spec("vllm")
    assert engine is not None
    assert engine.submodule_search_locations
    folder = Path(engine.submodule_search_locations[0]) / "v1"
    names = set()
    for call in ast.walk(ast.parse((folder / "metrics" / "loggers.py").read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _SUFFIXES:
            for text in _texts(call):
                if text.startswith("vllm:"):
                    names |= {text.removesuffix("_total") + suffix for suffix in _SUFFIXES[call.func.attr]}
    for text in _texts(ast.parse((folder / "spec_decode" / "metrics.py").read_text())):
        if re.fullmatch(r"vllm:spec_decode_\w+", text):
            names.add(f"{text}_total")
    return dict.fromkeys(names, _ENGINE_LABELS)


def _texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _series(metrics: Iterable[Metric]) -> dict[str, frozenset[str]]:
    labels = defaultdict[str, set[str]](set)
    for metric in metrics:
        for sample in metric.samples:
            labels[sample.name] |= set(sample.labels)
    return {name: frozenset(found) for name, found in labels.items()}


def named_metrics(query: str) -> set[str]:
    """Metrics in a PromQL query: every word that is no function, no keyword, no label and no text."""
    for pattern in (_STRING, _GROUPING, r"\{[^}]*\}", r"\[[^\]]*\]"):
        query = re.sub(pattern, " ", query)
    return set(re.findall(r"\b[A-Za-z_][\w:]*\b(?!\s*\()", query)) - _WORDS


def named_labels(query: str) -> set[str]:
    """Labels in a PromQL query: those it selects by, and those it groups by."""
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    grouped = [
        name for names in re.findall(_GROUPING, re.sub(_STRING, " ", query)) for name in re.split(r"[,\s]+", names)
    ]
    return {name for name in (*selected, *grouped) if name}


def selected_values(query: str, metric: str, label: str) -> set[str]:
    """Values of `label` that the query selects series of `metric` by; alternatives of a pattern one by one."""
    values = set()
    for matchers in re.findall(rf"\b{metric}\{{([^}}]*)\}}", query):
        for value in re.findall(rf'\b{label}\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
            values |= set(value.split("|"))
    return values
