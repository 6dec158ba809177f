"""Specs made from the schema: one that has every field, and ways to break it one by one."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specserve_operator.api.crd import DEFINITIONS, ResourceDefinition, resource_schema
from tests.cluster.api import Object

Path = tuple[str | int, ...]

_SERVING_TEMPLATE = {"spec": {"nodeSelector": {"pool": "a"}}}
WHOLE: dict[str, Object] = {
    "SpeculativeService": {
        "model": {"uri": "hf://org/target@main", "name": "target", "secretName": "hub"},
        "engine": {"image": "engine:1", "args": ["--seed", "1"]},
        "objectives": {
            "timeToFirstToken": [{"percentile": 90, "milliseconds": 500, "millisecondsPerThousandInputTokens": 6}],
            "timePerOutputToken": [{"percentile": 90, "milliseconds": 40}],
        },
        "classes": [{"name": "batch", "priority": 1, "timePerOutputToken": [{"percentile": 90, "milliseconds": 40}]}],
        "speculation": {
            "draft": {"method": "DraftModel", "uri": "hf://org/draft"},
            "mode": "Auto",
            "rolloutPercent": 100,
            "length": {"policy": "Static", "cap": "Mean", "min": 1, "max": 8, "tokens": 4},
            "controlPercent": 2,
        },
        "kvTransfer": {
            "tls": "Disabled",
            "connectTimeoutMilliseconds": 500,
            "stallTimeoutMilliseconds": 5000,
            "leaseSeconds": 30,
            "onFailure": "Recompute",
        },
        "budget": {"maxGPUs": 16},
        "prefill": {
            "scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 8},
            "drainTimeoutSeconds": 60,
            "args": ["--max-num-seqs", "8"],
            "template": _SERVING_TEMPLATE,
        },
        "decode": {"replicas": 2, "drainTimeoutSeconds": 60, "args": ["--seed", "2"], "template": _SERVING_TEMPLATE},
        "training": {
            "storage": {"uri": "pvc://drafts", "secretName": "hub"},
            "mode": "Auto",
            "scaling": {"minReplicas": 0, "maxReplicas": 1},
            "collect": {"percent": 100, "maxTokens": 1000, "maxBytesPerSecond": "50Mi"},
            "promote": {
                "minAcceptanceGainPercent": 2,
                "canaryPercent": 10,
                "minRequests": 200,
                "timeoutSeconds": 1800,
            },
            "template": _SERVING_TEMPLATE,
        },
        "gateway": {"replicas": 1, "port": 80, "template": _SERVING_TEMPLATE},
        "rollout": {"maxUnavailable": 1, "maxSurge": 1, "progressDeadlineSeconds": 600},
    },
    "PoolScaler": {"replicas": 1},
    "DraftRevision": {
        "service": "coder",
        "targetRevision": "abc",
        "method": "EAGLE3",
        "uri": "pvc://drafts/3",
        "sha256": "0" * 64,
        "tokenizerSha256": "1" * 64,
        "hiddenSize": 64,
    },
}


@dataclass(frozen=True, slots=True)
class Break:
    """One way in which a spec is wrong: what is at `path` becomes `value`, or goes where that is None."""

    kind: str
    path: Path
    what: str
    value: Any

    @property
    def field(self) -> str:
        """The name of the field, as messages have it."""
        return str(next(step for step in reversed(self.path) if isinstance(step, str)))

    def manifest(self) -> Object:
        spec = copy.deepcopy(WHOLE[self.kind])
        *parents, last = self.path
        node: Any = spec
        for step in parents:
            node = node[step]
        if self.value is None:
            del node[last]
        else:
            node[last] = self.value
        return resource(self.kind, spec)

    def __str__(self) -> str:
        return f"{self.kind}.{'.'.join(map(str, self.path))} {self.what}"


def resource(kind: str, spec: Object, *, name: str = "coder") -> Object:
    return {"apiVersion": "specserve.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def plural_of(kind: str) -> str:
    return next(definition.plural for definition in DEFINITIONS if definition.kind == kind)


def breaks() -> Iterator[Break]:
    """Every bound of every field of all resources, broken."""
    for definition in DEFINITIONS:
        yield from _walk(definition, resource_schema(definition)["properties"]["spec"], ())


def bounds() -> Iterator[Break]:
    """Every number at its least and at its greatest: nothing that a schema refuses."""
    for definition in DEFINITIONS:
        leaves = _leaves(resource_schema(definition)["properties"]["spec"], ())
        for path, schema in ((path, schema) for path, schema in leaves if _is_given(definition.kind, path[:-1])):
            for keyword in ("minimum", "maximum"):
                if keyword in schema:
                    yield Break(definition.kind, path, f"at its {keyword}", schema[keyword])


def _walk(definition: ResourceDefinition, schema: Mapping[str, Any], path: Path) -> Iterator[Break]:
    if path:
        for keyword, wrong in _WRONG.items():
            if keyword in schema:
                yield Break(definition.kind, path, f"breaks {keyword}", wrong(schema[keyword]))
        yield Break(definition.kind, path, "has another type", _of_another_type(schema["type"]))
        if schema.get("x-kubernetes-list-type") == "map":
            yield Break(definition.kind, path, "has an entry twice", _value_at(definition.kind, path) * 2)
        if "maxItems" in schema:
            entry = _value_at(definition.kind, path)[0]
            yield Break(definition.kind, path, "breaks maxItems", [entry] * (schema["maxItems"] + 1))
    if not _is_given(definition.kind, path):
        return
    for name in schema.get("required", ()):
        yield Break(definition.kind, (*path, name), "is missing", None)
    if schema["type"] == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        yield Break(definition.kind, (*path, "nonsense"), "is unknown", 1)
    for step, child in _children(schema):
        yield from _walk(definition, child, (*path, step))


def _leaves(schema: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    if not list(_children(schema)):
        yield path, schema
    for step, child in _children(schema):
        yield from _leaves(child, (*path, step))


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[str | int, Mapping[str, Any]]]:
    yield from schema.get("properties", {}).items()
    if "items" in schema:
        yield 0, schema["items"]


_WRONG: dict[str, Callable[[Any], Any]] = {
    "minimum": lambda bound: bound - 1,
    "maximum": lambda bound: bound + 1,
    "minLength": lambda bound: "a" * (bound - 1),
    "maxLength": lambda bound: "a" * (bound + 1),
    "enum": lambda _: "Nonsense",
    "pattern": lambda _: " no match ",
}


def _of_another_type(type_: str) -> Any:
    return {"integer": "one", "string": 1, "array": "one", "object": "one", "boolean": "yes"}[type_]


def _is_given(kind: str, path: Path) -> bool:
    """False for the parts that exclude another one in `WHOLE`; the other pool has them."""
    try:
        _value_at(kind, path)
    except (KeyError, IndexError):
        return False
    return True


def _value_at(kind: str, path: Path) -> Any:
    node: Any = WHOLE[kind]
    for step in path:
        node = node[step]
    return node
