from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.api.validation import (
    InvalidManifest,
    load_manifests,
    parse_manifests,
    parse_service,
    resolve_relative_uris,
)

MINIMAL = """\
apiVersion: specserve.dev/v1alpha1
kind: SpeculativeService
metadata: {name: coder}
spec: {model: {uri: hf://org/target}}
"""


def manifest(**spec: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(MINIMAL)
    loaded["spec"] |= spec
    return loaded


def problems_of(wrong: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidManifest) as refusal:
        parse_service(wrong)
    return str(refusal.value).splitlines()


def test_model_uri_alone_is_a_service() -> None:
    service = parse_service(manifest())
    assert service.metadata.name == "coder"
    assert service.spec.decode.drain_timeout_seconds == 120
    assert service.spec.prefill is None
    assert service.spec.gateway.port == 80


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"prefil": {}}, "spec.prefil: unknown field (did you mean prefill?)"),
        ({"colour": {}}, "spec.colour: unknown field"),
        ({"kv_transfer": {}}, "spec.kv_transfer: unknown field (did you mean kvTransfer?)"),
        ({"xyz": {}}, "spec.xyz: unknown field"),
        ({"decode": {"replica": 1}}, "spec.decode.replica: unknown field (did you mean replicas?)"),
        (
            {"prefill": {"scaling": {"maxReplicas": 1, "maxReplica": 1}}},
            "spec.prefill.scaling.maxReplica: unknown field (did you mean maxReplicas?)",
        ),
        (
            {"classes": [{"name": "a", "prio": 1}]},
            "spec.classes[0].prio: unknown field (did you mean priority?)",
        ),
        ({"model": {}}, "spec.model.uri: is missing"),
        ({"decode": {"replicas": "2"}}, 'spec.decode.replicas: Input should be a valid integer, got "2"'),
        ({"decode": {"replicas": True}}, "spec.decode.replicas: Input should be a valid integer, got true"),
        (
            {"decode": {"replicas": -1}},
            "spec.decode.replicas: Input should be greater than or equal to 0, got -1",
        ),
        (
            {"decode": {"replicas": 1, "scaling": {"maxReplicas": 1}}},
            "spec.decode: replicas and scaling exclude each other",
        ),
        (
            {"engine": {"args": ["--seed", 1]}},
            "spec.engine.args[1]: Input should be a valid string, got 1",
        ),
        (
            {"prefill": {"args": ["--port=1"]}},
            "spec.prefill.args[0]: a flag is set by the operator and must not be given in args: --port",
        ),
        (
            {"speculation": {"draft": {"method": "NGram"}, "mode": False}},
            "spec.speculation.mode: Input should be 'Auto', 'Always' or 'Never', got false"
            " (YAML reads on, off, yes and no as booleans: quote the word)",
        ),
        (
            {"model": {"uri": "org/target"}},
            "spec.model.uri: must be hf://org/name@commit, s3://..., oci://..., pvc://claim/path or"
            ' file:///absolute/path, got "org/target"',
        ),
        (
            {"classes": [{"name": "a"}, {"name": "a"}]},
            "spec.classes: name must differ from entry to entry: a is doubled",
        ),
        (
            {"objectives": {"timePerOutputToken": [{"percentile": 90, "milliseconds": n} for n in (1, 2)]}},
            "spec.objectives.timePerOutputToken: percentile must differ from entry to entry: 90 is doubled",
        ),
        ({"decode": {"template": {"spec": {"containers": [{}]}}}}, "spec.decode.template: spec.containers[0].name"),
        (
            {"decode": {"template": {"spec": {"containers": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}}}},
            "spec.decode.template: spec.containers[2].name: a stands twice",
        ),
        ({"decode": {"template": {"spec": {"volumes": {}}}}}, "spec.decode.template: spec.volumes must be a list"),
        ({"decode": {"template": {"spec": []}}}, "spec.decode.template: spec must be an object"),
        ({"decode": {"template": {"sepc": {}}}}, "spec.decode.template: unknown field sepc"),
        (
            {"decode": {"template": {"metadata": {"labels": {"a": 1}}}}},
            "spec.decode.template: metadata.labels must be an object of strings",
        ),
    ],
)
def test_problem_names_the_field_and_what_is_wrong(spec: dict[str, Any], problem: str) -> None:
    (line,) = problems_of(manifest(**spec))
    assert line.startswith(problem)


def test_all_problems_are_reported_at_once() -> None:
    lines = problems_of(manifest(prefil={}, decode={"replicas": "x"}, gateway={"port": 0}))
    assert sorted(line.split(":")[0] for line in lines) == ["spec.decode.replicas", "spec.gateway.port", "spec.prefil"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kind": "Deployment"}, 'kind: must be SpeculativeService, got "Deployment"'),
        ({"apiVersion": "v1"}, 'apiVersion: must be specserve.dev/v1alpha1, got "v1"'),
        ({"metadata": {}}, "metadata.name: is missing"),
        ({"metadata": None}, "metadata.name: is missing"),
        ({"metadata": {"name": "a" * 37}}, "metadata.name: String should have at most 36 characters"),
        ({"metadata": {"name": "9a"}}, "metadata.name: must be a letter first"),
        ({"spec": None}, "spec: is missing"),
        ({"spec": []}, "spec: Input should be an object, got []"),
        ({"spce": {}}, "spce: unknown field (did you mean spec?)"),
        ({"spec": {"model": {"uri": {1, 2}}}}, "holds a value that JSON cannot express"),
    ],
)
def test_problem_of_the_whole_object(changes: dict[str, Any], problem: str) -> None:
    (line,) = problems_of(manifest() | changes)
    assert line.startswith(problem)


@pytest.mark.parametrize("missing", ["apiVersion", "kind"])
def test_identity_is_required(missing: str) -> None:
    incomplete = manifest()
    del incomplete[missing]
    (line,) = problems_of(incomplete)
    assert line.startswith(f"{missing}: is missing; must be ")


def test_field_that_is_null_counts_as_absent() -> None:
    service = parse_service(manifest(prefill=None, decode=None, engine={"image": None}))
    assert service.spec.prefill is None
    assert service.spec.decode.drain_timeout_seconds == 120


def test_null_inside_a_pod_template_stays() -> None:
    template = {"spec": {"securityContext": None}}
    assert parse_service(manifest(decode={"template": template})).spec.decode.template == template


def test_long_value_is_cut_in_the_message() -> None:
    (line,) = problems_of(manifest(model={"uri": "x" * 500}))
    assert line.endswith("xxx...")
    assert len(line) < 250


def test_service_goes_back_to_the_manifest_it_came_from() -> None:
    given_manifest = manifest(
        decode={"replicas": 2, "args": ["--seed", "1"]},
        objectives={"timeToFirstToken": [{"percentile": 90, "milliseconds": 500}]},
        kvTransfer={"tls": "Disabled"},
        budget={"maxGPUs": 4},
    )
    assert parse_service(given_manifest).to_manifest() == given_manifest


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: [1", "f.yaml, line 1, column 6: not valid YAML: expected ',' or ']'"),
        ("a: 1\nb: 2\na: 3", "f.yaml, line 3, column 1: not valid YAML: key a stands twice"),
        ("a: {b: 1, b: 2}", "f.yaml, line 1, column 11: not valid YAML: key b stands twice"),
        ("x:\n\t- 1", "f.yaml, line 2, column 1: not valid YAML: found character"),
        ("a: !!python/name:os.system x", "f.yaml, line 1, column 4: not valid YAML: could not determine"),
        ("\x00", "f.yaml: not valid YAML: unacceptable character"),
        ("- 1", "f.yaml: must be an object, got [1]"),
        ("a: 1\n---\ntext", 'f.yaml, document 2: must be an object, got "text"'),
        ("", "f.yaml: holds no SpeculativeService"),
        ("---\n---\n", "f.yaml: holds no SpeculativeService"),
        (MINIMAL + "---\n" + MINIMAL, "f.yaml, document 2: metadata.name: coder is there twice"),
        (MINIMAL + "---\nkind: X\n", "f.yaml, document 2: apiVersion: is missing"),
        (MINIMAL + "extra: 1", "f.yaml: extra: unknown field"),
    ],
)
def test_error_names_file_document_line_and_column(text: str, error: str) -> None:
    with pytest.raises(InvalidManifest) as refusal:
        parse_manifests(text, "f.yaml")
    assert str(refusal.value).startswith(error)


def test_every_line_of_an_error_names_the_file() -> None:
    with pytest.raises(InvalidManifest) as refusal:
        parse_manifests(MINIMAL + "a: 1\nb: 2\n", "f.yaml")
    assert [line.split(": ")[:2] for line in str(refusal.value).splitlines()] == [["f.yaml", "a"], ["f.yaml", "b"]]
    assert [problem.path for problem in refusal.value.problems] == ["a", "b"]


def test_dates_stay_strings() -> None:
    (loaded,) = load_manifests("created: 2024-01-02T03:04:05Z\nday: 2024-01-02", "f.yaml")
    assert loaded == {"created": "2024-01-02T03:04:05Z", "day": "2024-01-02"}


def test_merge_keys_and_anchors_work() -> None:
    (loaded,) = load_manifests("a: &a {x: 1}\nb: {<<: *a, y: 2}", "f.yaml")
    assert loaded["b"] == {"x": 1, "y": 2}


def test_relative_uris_are_read_from_the_folder_of_the_manifest(tmp_path: Path) -> None:
    relative = manifest(
        model={"uri": "file://./models/target"},
        speculation={"draft": {"method": "DraftModel", "uri": "file://../draft"}},
        training={"storage": {"uri": "file://./drafts"}},
    )
    spec = resolve_relative_uris(relative, tmp_path)["spec"]
    assert spec["model"]["uri"] == f"file://{tmp_path}/models/target"
    assert spec["speculation"]["draft"]["uri"] == f"file://{tmp_path.parent}/draft"
    assert spec["training"]["storage"]["uri"] == f"file://{tmp_path}/drafts"
    assert relative["spec"]["model"]["uri"] == "file://./models/target"


def test_folder_with_a_space_in_its_name_works(tmp_path: Path) -> None:
    text = MINIMAL.replace("hf://org/target", "file://./target")
    (service,) = parse_manifests(text, "f.yaml", tmp_path / "my folder")
    assert service.spec.model.uri == f"file://{tmp_path}/my folder/target"


def test_relative_uri_without_a_folder_is_refused() -> None:
    with pytest.raises(InvalidManifest, match=r"spec\.model\.uri: must be .*file:///absolute/path"):
        parse_manifests(MINIMAL.replace("hf://org/target", "file://./target"), "f.yaml")


@pytest.mark.parametrize("uri", ["hf://org/x", "file:///abs", "pvc://claim/./x", "./x", 3, None])
def test_other_uris_are_left_alone(uri: Any, tmp_path: Path) -> None:
    assert resolve_relative_uris(manifest(model={"uri": uri}), tmp_path) == manifest(model={"uri": uri})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["model", "engine", "classes", "decode", "prefill", "speculation", "training", "rollout", "x"])


@settings(deadline=None)
@given(st.dictionaries(FIELDS, JSON_VALUES, max_size=4), JSON_VALUES)
def test_no_object_causes_anything_but_an_invalid_manifest(spec: dict[str, Any], metadata: Any) -> None:
    for candidate in (manifest(**spec), manifest() | {"metadata": metadata}, manifest() | {"spec": metadata}):
        with suppress(InvalidManifest):
            parse_service(resolve_relative_uris(candidate, Path("/models")))


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_text_causes_anything_but_an_invalid_manifest(text: str) -> None:
    with pytest.raises(InvalidManifest, match=r"^f\.yaml"):
        parse_manifests(text, "f.yaml")
