"""The chart brings the project's CRDs, and upgrades them: Helm itself never touches those in a folder `crds`."""

import copy

import pytest
import yaml

from tests.chart.rendering import CHART, ROOT, Manifest, Release, of_kind, render

SOURCE = ROOT / "crds"
COPY = CHART / "files" / "crds"


def _crds(release: Release) -> dict[str, Manifest]:
    return {crd["metadata"]["name"]: crd for crd in of_kind(render(release), "CustomResourceDefinition")}


def test_copies_are_identical_with_the_generated_files() -> None:
    source = {path.name: path.read_bytes() for path in SOURCE.glob("*.yaml")}
    assert source
    assert {path.name: path.read_bytes() for path in COPY.iterdir()} == source, (
        "run hack/generate.sh, which copies crds/ into the chart"
    )


def test_rendered_definitions_are_those_of_the_files() -> None:
    rendered = _crds(Release())
    for path in SOURCE.glob("*.yaml"):
        expected = yaml.safe_load(path.read_text())
        found = copy.deepcopy(rendered.pop(expected["metadata"]["name"]))
        del found["metadata"]["labels"], found["metadata"]["annotations"]
        assert found == expected
    assert not rendered


def test_definitions_outlive_the_release_unless_told_otherwise() -> None:
    for crd in _crds(Release()).values():
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for crd in _crds(Release({"crds": {"keep": False}})).values():
        assert "annotations" not in crd["metadata"]


def test_definitions_can_be_left_to_others() -> None:
    assert not _crds(Release({"crds": {"install": False}}))
    assert not (CHART / "crds").exists()


@pytest.mark.parametrize("keep", [True, False])
def test_the_ca_outlives_the_release(keep: bool) -> None:
    (secret,) = of_kind(render(Release({"crds": {"keep": keep}})), "Secret")
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    # An upgrade patches what the chart says: with data here it would put the operator's back.
    assert not {"data", "stringData"} & set(secret)
