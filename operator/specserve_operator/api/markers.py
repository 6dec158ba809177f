"""Annotations for fields whose meaning to Kubernetes is more than their type: how lists merge, pod templates.

Each puts the `x-kubernetes-*` keywords into the field's schema (api/crd.py hands them on) and makes pydantic
refuse what the API server refuses because of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class ListMap:
    """A list of objects that are told apart, and merged by server-side apply, by the value of one field.

    `key` is the field's name outside (camelCase); it must be required.
    """

    key: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._refuse_doubles, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            **handler(schema),
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": [self.key],
        }

    def _refuse_doubles(self, items: Sequence[BaseModel]) -> Sequence[BaseModel]:
        counts = Counter(str(getattr(item, self.key)) for item in items)
        doubles = [value for value, count in counts.items() if count > 1]
        if doubles:
            raise ValueError(f"{self.key} must differ from entry to entry: {', '.join(doubles)} is doubled")
        return items


@dataclass(frozen=True, slots=True)
class Atomic:
    """A list with one owner: server-side apply replaces it whole. Order and repetition have meaning."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "x-kubernetes-list-type": "atomic"}


@dataclass(frozen=True, slots=True)
class _PodTemplateMarker:
    """Any PodTemplateSpec: the API server keeps all of it, pydantic looks at the parts that are merged."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_check_pod_template, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


PodTemplate = Annotated[dict[str, Any], _PodTemplateMarker()]


def _check_pod_template(template: dict[str, Any]) -> dict[str, Any]:
    """Refuses what cannot be merged into our own pod template, naming the field.

    Everything else in a pod is left to the API server, which knows the fields of its own version.
    """
    if unknown := sorted(set(template) - {"metadata", "spec"}):
        raise ValueError(f"unknown field {unknown[0]}; a pod template has metadata and spec")
    metadata, spec = template.get("metadata", {}), template.get("spec", {})
    for name, value in (("metadata", metadata), ("spec", spec)):
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object")
    for name in ("labels", "annotations"):
        values = metadata.get(name, {})
        if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
            raise ValueError(f"metadata.{name} must be an object of strings (quote numbers and booleans)")
    for name in ("containers", "initContainers", "volumes"):
        _check_named_items(f"spec.{name}", spec.get(name, []))
    return template


def _check_named_items(path: str, items: Any) -> None:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{path} must be a list of objects")
    names: set[str] = set()
    for index, item in enumerate(items):
        if not isinstance(item.get("name"), str) or not item["name"]:
            raise ValueError(f"{path}[{index}].name is missing")
        if item["name"] in names:
            raise ValueError(f"{path}[{index}].name: {item['name']} stands twice")
        names.add(item["name"])
