"""The committed CRDs: current, accepted by Kubernetes' own rules for CRDs, and right about whole manifests."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from specserve_operator.api.crd import (
    DEFINITIONS,
    DRAFT_REVISION,
    POOL_SCALER,
    SPECULATIVE_SERVICE,
    ResourceDefinition,
    main,
    resource_schema,
)
from specserve_operator.api.validation import InvalidManifest, parse_service, resolve_relative_uris
from tests.unit.api.fake_apiserver import admit, with_defaults

ROOT = Path(__file__).parents[2]
CRDS = ROOT / "crds"

# What a node of a structural schema may hold (Kubernetes documentation, "Specifying a structural schema").
STRUCTURAL_KEYWORDS = {
    "type",
    "description",
    "format",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "required",
    "properties",
    "items",
    "additionalProperties",
    "default",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
}

# Every field of the API that can stand beside the others.
FULL_SERVICE = """\
apiVersion: specserve.dev/v1alpha1
kind: SpeculativeService
metadata: {name: coder, namespace: llm}
spec:
  model:
    name: qwen2.5-coder
    uri: hf://Qwen/Qwen2.5-Coder-1.5B-Instruct@0123abc
    secretName: hf-token
  engine:
    image: registry.example/specserve-worker:1
    args: ["--max-model-len", "8192"]
  objectives:
    timeToFirstToken:   [{percentile: 90, milliseconds: 500, millisecondsPerThousandInputTokens: 60}]
    timePerOutputToken: [{percentile: 90, milliseconds: 40}, {percentile: 99, milliseconds: 80}]
  classes:
  - {name: interactive, priority: 100, timePerOutputToken: [{percentile: 99, milliseconds: 30}]}
  - {name: batch, priority: 0}
  speculation:
    mode: Auto
    rolloutPercent: 100
    draft: {method: EAGLE3, uri: hf://org/head}
    length: {policy: DSDE, cap: Goodput, min: 0, max: 8}
    controlPercent: 2
  kvTransfer:
    tls: Automatic
    connectTimeoutMilliseconds: 500
    stallTimeoutMilliseconds: 5000
    leaseSeconds: 30
    onFailure: Recompute
  budget: {maxGPUs: 16}
  prefill:
    scaling: {mode: Auto, minReplicas: 1, maxReplicas: 8}
    drainTimeoutSeconds: 120
    args: []
    template:
      metadata: {labels: {team: search}}
      spec:
        nodeSelector: {pool: prefill}
        containers: [{name: engine, resources: {limits: {nvidia.com/gpu: 1}}}]
  decode:   {scaling: {maxReplicas: 8}, template: {spec: {}}}
  training:
    mode: Auto
    scaling: {minReplicas: 0, maxReplicas: 1}
    storage: {uri: pvc://drafts, secretName: drafts}
    collect: {percent: 100, maxTokens: 2000000, maxBytesPerSecond: 50Mi}
    promote: {minAcceptanceGainPercent: 2, canaryPercent: 10, minRequests: 200, timeoutSeconds: 1800}
    template: {}
  gateway: {replicas: 1, port: 80, template: {}}
  rollout: {maxUnavailable: 0, maxSurge: 1, minReadySeconds: 0, progressDeadlineSeconds: 1800}
"""


def committed(definition: ResourceDefinition) -> dict[str, Any]:
    crd: dict[str, Any] = yaml.safe_load((CRDS / definition.file_name).read_text())
    return crd


def committed_schema(definition: ResourceDefinition) -> dict[str, Any]:
    schema: dict[str, Any] = committed(definition)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            yield from nodes(schema[keyword], f"{path}[]")


NODES = [
    pytest.param(node, id=path)
    for definition in DEFINITIONS
    for path, node in nodes(resource_schema(definition), definition.kind)
]


def test_files_are_current() -> None:
    assert main([str(CRDS), "--check"]) == 0
    assert {path.name for path in CRDS.iterdir()} == {definition.file_name for definition in DEFINITIONS}


def test_check_fails_with_a_diff_on_a_stale_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    path = tmp_path / SPECULATIVE_SERVICE.file_name
    path.write_text(path.read_text().replace("maximum: 64", "maximum: 65", 1))
    (tmp_path / POOL_SCALER.file_name).unlink()
    assert main([str(tmp_path), "--check"]) == 1
    printed = capsys.readouterr().out
    assert "-                        maximum: 65\n+                        maximum: 64\n" in printed
    assert "+  name: poolscalers.specserve.dev\n" in printed
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.kind)
@pytest.mark.parametrize("version", ["1.30", "1.34", "1.37"])
def test_crd_is_valid_for_kubernetes(definition: ResourceDefinition, version: str) -> None:
    kubernetes_validate.validate(committed(definition), version, strict=True)


def test_validation_of_crds_is_strict() -> None:
    wrong = committed(SPECULATIVE_SERVICE)
    wrong["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["ref"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.kind)
def test_schema_is_valid_json_schema(definition: ResourceDefinition) -> None:
    jsonschema.Draft202012Validator.check_schema(committed_schema(definition))


@pytest.mark.parametrize("node", NODES)
def test_node_is_structural(node: dict[str, Any]) -> None:
    assert set(node) <= STRUCTURAL_KEYWORDS
    assert node["type"] in {"object", "array", "string", "integer", "boolean"}
    assert ("items" in node) == (node["type"] == "array")
    assert not ("properties" in node and "additionalProperties" in node)
    assert set(node.get("required", [])) <= set(node.get("properties", {}))
    if node["type"] == "object":
        assert {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"} & set(node) or set(
            node
        ) == {"type"}
    if "default" in node:
        assert admit(node, node["default"]) == []
        # CEL rules see this default before those of the fields inside it are filled in.
        assert with_defaults(node, node["default"]) == node["default"]


@pytest.mark.parametrize("node", NODES)
def test_list_says_how_it_is_merged_and_ends_somewhere(node: dict[str, Any]) -> None:
    if node["type"] != "array":
        return
    assert node["maxItems"] <= 256
    if node["x-kubernetes-list-type"] == "map":
        item = node["items"]
        for key in node["x-kubernetes-list-map-keys"]:
            assert key in item["required"] or "default" in item["properties"][key]
    else:
        assert node["x-kubernetes-list-type"] == "atomic"


@pytest.mark.parametrize(
    ("definition", "part"), [(definition, part) for definition in DEFINITIONS for part in ("spec", "status")]
)
def test_numbers_are_integers_and_strings_are_bounded(definition: ResourceDefinition, part: str) -> None:
    for path, node in nodes(committed_schema(definition)["properties"][part], part):
        assert node["type"] != "number", path
        if node["type"] == "string" and part == "spec":
            assert "maxLength" in node or "enum" in node, path


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.kind)
def test_spec_is_described_for_kubectl_explain(definition: ResourceDefinition) -> None:
    schema = committed_schema(definition)
    assert schema["description"]
    for path, node in nodes(schema["properties"]["spec"], "spec"):
        if node["type"] == "object" and "[]" not in path:
            assert node.get("description"), path


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.kind)
def test_columns_and_scale_read_fields_that_exist(definition: ResourceDefinition) -> None:
    version = committed(definition)["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    paths = {column["jsonPath"]: column["type"] for column in version["additionalPrinterColumns"]}
    paths |= {
        path: "string" if name == "labelSelectorPath" else "integer"
        for name, path in version["subresources"].get("scale", {}).items()
    }
    for path, kind in paths.items():
        if path == ".metadata.creationTimestamp":
            continue
        node = schema
        for name in path.split("[?")[0].strip(".").split("."):
            node = node["properties"][name]
        if "[?" in path:
            node = node["items"]["properties"][path.rsplit(".", 1)[1]]
        assert node["type"] == kind, path


def test_columns_are_those_of_the_api() -> None:
    columns = committed(SPECULATIVE_SERVICE)["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"].upper() for column in columns if not column.get("priority")] == [
        *("READY", "PREFILL", "DECODE", "TRAIN", "TTFT", "TPOT", "ACCEPT", "SPEC", "DRAFT", "AGE")
    ]
    assert [column["name"].upper() for column in columns if column.get("priority")] == [
        *("REASON", "SPEEDUP", "KV-FALLBACKS")
    ]
    names = committed(SPECULATIVE_SERVICE)["spec"]["names"]
    assert (names["shortNames"], names["categories"]) == (["spsvc"], ["specserve"])


def test_only_pool_scaler_has_the_scale_subresource() -> None:
    subresources = {d.kind: set(committed(d)["spec"]["versions"][0]["subresources"]) for d in DEFINITIONS}
    assert subresources == {
        "SpeculativeService": {"status"},
        "DraftRevision": {"status"},
        "PoolScaler": {"status", "scale"},
    }


def full_service() -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(FULL_SERVICE)
    return manifest


def test_service_with_every_field_is_accepted() -> None:
    manifest = full_service()
    assert admit(committed_schema(SPECULATIVE_SERVICE), manifest) == []
    assert parse_service(manifest).to_manifest() == manifest


def test_service_with_every_field_misses_none_of_the_schema() -> None:
    # `tokens` and `replicas` exclude other fields that are there.
    def missing(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
        for name, child in schema.get("properties", {}).items():
            if name not in value:
                yield f"{path}.{name}"
            elif isinstance(value[name], dict):
                yield from missing(child, value[name], f"{path}.{name}")

    spec = committed_schema(SPECULATIVE_SERVICE)["properties"]["spec"]
    decode = {"decode.drainTimeoutSeconds", "decode.args", "decode.scaling.mode", "decode.scaling.minReplicas"}
    assert {path.removeprefix(".") for path in missing(spec, full_service()["spec"], "")} == {
        "speculation.length.tokens",
        "prefill.replicas",
        "decode.replicas",
        *decode,
    }


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example_is_accepted(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        manifest = resolve_relative_uris(document, path.parent)
        assert admit(committed_schema(SPECULATIVE_SERVICE), manifest) == []
        parse_service(manifest)


def test_relative_uri_is_refused_in_a_cluster() -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    errors = admit(committed_schema(SPECULATIVE_SERVICE), manifest)
    assert sorted(error.split(":")[0] for error in errors) == ["spec.model.uri", "spec.speculation.draft.uri"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.prefil", {}),
        ("spec.decode.replica", 1),
        ("spec.decode.replicas", "2"),
        ("spec.decode.replicas", 1.5),
        ("spec.decode.replicas", 1),  # beside scaling
        ("spec.decode.scaling.mode", "auto"),
        ("spec.decode.scaling.maxReplicas", 0),
        ("spec.speculation.mode", False),
        ("spec.speculation.length.max", 65),
        ("spec.speculation.length.tokens", 1),
        ("spec.speculation.draft.method", "NGram"),
        ("spec.model.uri", "file://./models"),
        ("spec.model.uri", "https://example.org/model"),
        ("spec.objectives.timeToFirstToken", [{"percentile": 100, "milliseconds": 1}]),
        ("spec.objectives.timeToFirstToken", [{"percentile": 90, "milliseconds": 1}] * 2),
        ("spec.classes", [{"name": "a"}, {"name": "a"}]),
        ("spec.engine.args", ["--kv_transfer_config={}"]),
        ("spec.engine.args", [8]),
        ("spec.prefill.args", ["-sc"]),
        ("spec.training.collect.maxBytesPerSecond", "fast"),
        ("spec.gateway.port", 0),
        ("spec.rollout", {"maxSurge": 0}),
        ("spec.rollout", {"minReadySeconds": 60, "progressDeadlineSeconds": 60}),
        ("metadata.name", "x" * 37),
    ],
)
def test_wrong_field_is_refused_by_crd_and_by_parser_alike(path: str, value: Any) -> None:
    manifest = full_service()
    node: dict[str, Any] = manifest
    *parents, last = path.split(".")
    for name in parents:
        node = node[name]
    node[last] = value
    assert admit(committed_schema(SPECULATIVE_SERVICE), copy.deepcopy(manifest)) != []
    with pytest.raises(InvalidManifest, match=parents[0]):
        parse_service(manifest)


def test_draft_revision_and_pool_scaler_are_accepted() -> None:
    draft = {
        "service": "coder",
        "targetRevision": "0123456789",
        "method": "EAGLE3",
        "uri": "pvc://drafts/coder/3",
        "sha256": "0" * 64,
        "tokenizerSha256": "a" * 64,
        "hiddenSize": 1536,
    }
    for definition, spec in ((DRAFT_REVISION, draft), (POOL_SCALER, {"replicas": 0})):
        manifest = {
            "apiVersion": "specserve.dev/v1alpha1",
            "kind": definition.kind,
            "metadata": {"name": "coder-decode-with-a-name-longer-than-a-service-may-have"},
            "spec": spec,
        }
        assert admit(committed_schema(definition), manifest) == []
        definition.model.model_validate(manifest)
        assert admit(committed_schema(definition), {**manifest, "spec": {}}) != []
