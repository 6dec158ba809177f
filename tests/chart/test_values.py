"""What values the chart takes, and what it says of wrong ones."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve_operator.api.validation import parse_service
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.problems import find_problems
from specserve_operator.identity.authority import AuthorityPolicy, PolicyError
from tests.chart.cases import CASES
from tests.chart.rendering import CHART, HelmError, Release, render, run_helm

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def _schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its path. `properties` and `definitions` hold schemas and are none."""
    yield path, schema
    for word in ("properties", "definitions"):
        for name, inner in schema.get(word, {}).items():
            yield from _schemas(inner, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from _schemas(schema[word], f"{path}[]")
    for inner in schema.get("allOf", ()):
        yield from _schemas(inner, path)


def _values(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every value that the schema describes, without the insides of lists."""
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name), inner
        yield from _values(inner, (*path, name))


@pytest.mark.parametrize("name", CASES)
def test_helm_finds_nothing_to_complain_about(name: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(dict(CASES[name].values)))
    # Without an icon there is one remark, which --quiet leaves out; it is no warning.
    report = run_helm("lint", str(CHART), "--strict", "--quiet", "--kube-version=1.34.0", f"--values={values}")
    assert "[WARNING]" not in report
    assert "[ERROR]" not in report


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"leaderElection": {"on": True}}, "on"),
        ({"monitoring": {"serviceMonitor": {"enable": True}}}, "enable"),
        ({"networkPolicy": {"apiServer": {"port": 6443}}}, "port"),
        ({"tolerations": [{"keys": "x"}]}, "keys"),
        ({"extraEnv": [{"name": "X", "valueFrom": {"secret": {}}}]}, "secret"),
        ({"affinity": {"podAntiAffinity": {"required": []}}}, "required"),
    ],
)
def test_a_value_that_the_chart_does_not_know_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError, match=f"additional properties '{named}' not allowed"):
        render(Release(values))


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": "two"},
        {"replicas": -1},
        {"logging": {"level": "verbose"}},
        {"identity": {"certificateLifetimeSeconds": 59}},
        {"identity": {"certificateLifetimeSeconds": 604_801}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"image": {"repository": ""}},
        {"image": {"digest": "latest"}},
        {"watch": {"namespaces": ["Team_A"]}},
        {"watch": {"namespaces": ["a", "a"]}},
        {"monitoring": {"serviceMonitor": {"enabled": "yes"}}},
        {"podLabels": {"replicas": 1}},
        {"resources": {"limits": {"memory": "1 GB"}}},
        {"extraVolumes": [{"name": "nothing"}]},
        {"networkPolicy": {"apiServer": {"ports": []}}},
    ],
)
def test_a_value_of_the_wrong_form_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(HelmError, match="values don't meet the specifications of the schema"):
        render(Release(values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 2}, "replicas: more than one operator needs leaderElection.enabled=true"),
        ({"gateway": {"image": {"tag": "1"}}}, "gateway.image.repository: needed with gateway.image.tag"),
        ({"identity": {"secret": {"create": False}}}, "identity.secret.name: needed with identity.secret.create=false"),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_way_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(Release(values))


def test_every_lifetime_that_the_chart_takes_is_one_that_the_operator_takes() -> None:
    seconds = SCHEMA["properties"]["identity"]["properties"]["certificateLifetimeSeconds"]
    for bound in ("minimum", "maximum"):
        lifetime = timedelta(seconds=seconds[bound])
        assert AuthorityPolicy(certificate_lifetime=lifetime).certificate_lifetime == lifetime
    with pytest.raises(PolicyError):
        AuthorityPolicy(certificate_lifetime=timedelta(seconds=seconds["maximum"] + 1))


def test_a_parent_chart_may_set_global_values() -> None:
    assert render(Release({"global": {"imageRegistry": "elsewhere"}})) == render(Release())


def test_every_object_of_the_schema_is_closed() -> None:
    # Set by whatever chart this is part of; and sources of volumes, of which the API server knows the fields.
    open_ones = {".global", ".volumeSource"}
    found = {path for path, schema in _schemas(SCHEMA) if schema.get("type") == "object"}
    closed = {
        path
        for path, schema in _schemas(SCHEMA)
        if schema.get("type") == "object"
        and (schema.get("additionalProperties") is False or isinstance(schema.get("additionalProperties"), dict))
    }
    assert found - closed == open_ones


def test_every_value_is_described_and_has_a_default() -> None:
    for path, schema in _values(SCHEMA):
        if path[0] == "global" or (path[0] in ("affinity", "resources") and len(path) > 1):
            continue  # the user's own, in Kubernetes' words
        assert len(schema.get("description", "")) >= 10, ".".join(path)
        value: Any = DEFAULTS
        for name in path:
            assert name in value, ".".join(path)
            value = value[name]


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    package = (CHART.parents[1] / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in package
    assert chart["version"] == chart["appVersion"]


def test_the_example_of_the_notes_is_a_service_that_can_be_served() -> None:
    manifest = yaml.safe_load((CHART / "files" / "example.yaml").read_text())
    manifest["metadata"]["namespace"] = "default"
    config = OperatorConfig(default_engine_image="engine", gateway_image="gateway", operator_version="0.1.0")
    assert find_problems(parse_service(manifest), config) == ()
