"""Rendered objects are what the files in tests/golden/ say, and what Kubernetes' own schema accepts."""

import difflib

import kubernetes_validate
import pytest

from specserve_operator.constants import GROUP
from tests.golden.cases import CASES, FOLDER, REGENERATE, golden_file, golden_text, render_case

# The oldest Kubernetes whose objects are rendered: the preStop sleep and the budget's eviction policy need it.
OLDEST_KUBERNETES = "1.31"
NEWEST_KUBERNETES = "1.34"


@pytest.mark.parametrize("name", CASES)
def test_rendered_objects_equal_their_golden_file(name: str) -> None:
    expected, found = golden_file(name).read_text(encoding="utf-8"), golden_text(name)
    diff = difflib.unified_diff(expected.splitlines(), found.splitlines(), "golden", "rendered", lineterm="")
    assert found == expected, f"run `{REGENERATE}` and review the difference:\n" + "\n".join(diff)


def test_there_is_no_golden_file_without_a_case() -> None:
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("name", CASES)
def test_rendered_objects_are_valid_kubernetes_objects(name: str, version: str) -> None:
    for obj in render_case(name):
        if not obj["apiVersion"].startswith((GROUP, "monitoring.coreos.com")):
            kubernetes_validate.validate(obj, version, strict=True)
