"""Names and namespaces of what is installed."""

import re
from typing import Any

import pytest

from tests.chart.cases import CASES
from tests.chart.rendering import PROMETHEUS_OPERATOR, Manifest, Release, only, operator_container, render

CLUSTER_KINDS = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
EVERYTHING = CASES["everything"].values


@pytest.mark.parametrize(
    ("release", "values", "operator"),
    [
        ("specserve", {}, "specserve-operator"),
        ("llm", {}, "llm-specserve-operator"),
        ("my-specserve", {}, "my-specserve-operator"),
        ("llm", {"nameOverride": "spec"}, "llm-spec-operator"),
        ("llm", {"fullnameOverride": "ours"}, "ours-operator"),
        ("llm", {"fullnameOverride": "o" * 54}, "o" * 54 + "-operator"),
        ("a" * 43 + "-bcdefghij", {}, "a" * 43 + "-bcdefghij-operator"),
        ("a" * 52, {}, "a" * 52 + "-s-operator"),
        ("a" * 53, {}, "a" * 53 + "-operator"),
    ],
)
def test_names_follow_the_release(release: str, values: dict[str, Any], operator: str) -> None:
    objects = render(Release(values, name=release))
    assert only(objects, "Deployment")["metadata"]["name"] == operator
    # The name of a Service is a DNS label, and longer ones are cut off, never refused.
    assert only(objects, "Service")["metadata"]["name"] == operator
    assert len(operator) <= 63


def _strings(value: Any) -> list[str]:
    """All keys and strings in a value."""
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in _strings(part)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def _places(objects: list[Manifest]) -> set[str | None]:
    return {obj["metadata"].get("namespace") for obj in objects if obj["kind"] not in CLUSTER_KINDS}


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_everything_is_in_the_namespace_of_the_release(values: dict[str, Any]) -> None:
    objects = render(Release(values, namespace="elsewhere-7", apis=PROMETHEUS_OPERATOR))
    assert _places(objects) == {"elsewhere-7"}
    assert not [obj for obj in objects if obj["kind"] in CLUSTER_KINDS and "namespace" in obj["metadata"]]


def test_a_namespace_shows_in_every_place_that_names_one() -> None:
    """Two namespaces of one length: what is rendered for one is what is rendered for the other, renamed."""
    here = render(Release(EVERYTHING, namespace="first-ns", apis=PROMETHEUS_OPERATOR))
    there = render(Release(EVERYTHING, namespace="other-ns", apis=PROMETHEUS_OPERATOR))
    assert [text.replace("first-ns", "other-ns") for text in _strings(here)] == _strings(there)
    assert not [text for text in _strings(there) if re.search(r"\b(default|kube-system)\.svc\b|first-ns", text)]


def test_a_release_and_a_namespace_may_be_named_like_numbers() -> None:
    values = {"watch": {"namespaces": ["123"]}, "serviceAccount": {"name": "456"}}
    objects = render(Release(values, name="1e3", namespace="123"))
    assert _places(objects) == {"123"}
    assert only(objects, "ServiceAccount")["metadata"]["name"] == "456"
    assert only(objects, "Service")["spec"]["selector"]["app.kubernetes.io/instance"] == "1e3"
    assert "--watch-namespace=123" in operator_container(objects)["args"]


def test_two_objects_never_share_a_name() -> None:
    for case in CASES.values():
        places = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in render(case)]
        assert len(places) == len(set(places))
