"""What the chart installs is what the files in tests/chart/golden say, and what Kubernetes' own schemas accept."""

import difflib
import functools
from collections.abc import Iterator

import kubernetes_validate
import pytest

from tests.chart.cases import CASES, FOLDER, REGENERATE, golden_file, golden_text
from tests.chart.rendering import Manifest, render

# The oldest Kubernetes that the chart accepts, and those that are supported now.
KUBERNETES = ("1.31", "1.34", "1.35", "1.36", "1.37")
# Kinds of the Prometheus Operator, of which Kubernetes has no schemas.
FOREIGN_KINDS = {"PrometheusRule", "ServiceMonitor"}


@pytest.fixture(scope="module", autouse=True)
def _schemas_read_once() -> Iterator[None]:
    """The validator reads a file of megabytes for every object otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", read)
        yield


@pytest.mark.parametrize("name", CASES)
def test_rendered_objects_equal_their_golden_file(name: str) -> None:
    expected, found = golden_file(name).read_text(encoding="utf-8"), golden_text(name)
    diff = difflib.unified_diff(expected.splitlines(), found.splitlines(), "golden", "rendered", lineterm="")
    assert found == expected, f"run `{REGENERATE}` and review the difference:\n" + "\n".join(diff)


def test_there_is_no_golden_file_without_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", CASES)
def test_rendered_objects_are_valid_kubernetes_objects(name: str, version: str) -> None:
    objects = [obj for obj in render(CASES[name]) if obj["kind"] not in FOREIGN_KINDS]
    assert len(objects) > 10
    for obj in objects:
        kubernetes_validate.validate(obj, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
def test_a_field_that_kubernetes_does_not_know_is_found(version: str) -> None:
    obj: Manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containres": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(obj, version, strict=True)
    assert version in {v.rpartition(".")[0] for v in kubernetes_validate.utils.all_versions()}


@pytest.mark.parametrize("name", CASES)
def test_nothing_holds_up_an_uninstall(name: str) -> None:
    for obj in render(CASES[name]):
        assert "finalizers" not in obj["metadata"]
        hook = obj["metadata"].get("annotations", {}).get("helm.sh/hook")
        assert (obj["kind"], hook) in {("Pod", "test"), (obj["kind"], None)}
