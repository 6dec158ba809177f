"""pydantic models -> structural OpenAPI v3 schemas, the kind that a CustomResourceDefinition may hold.

pydantic writes JSON schema with `$ref`, `anyOf` with null, titles and null defaults; Kubernetes wants every type
spelled out in place. Each keyword is either translated here on purpose or refused: none is dropped unseen.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from specserve_operator.api.cel import Rule
from specserve_operator.api.rules import RULES

Schema = dict[str, Any]

# Keywords that mean the same on both sides. Written in this order.
_KEPT = (
    "description",
    "type",
    "format",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
    "required",
    "x-kubernetes-validations",
)
# Translated below, or implied: the API server drops unknown fields by itself, and kubectl warns of them.
_TRANSLATED = frozenset({"additionalProperties", "const", "default", "items", "properties"})
_IMPLIED = frozenset({"title"})

_INT32_MAX = 2**31 - 1


class SchemaError(ValueError):
    """A model uses something that has no structural form. The message names the place."""


def structural_schema(model: type[BaseModel], *, with_defaults: bool = True) -> Schema:
    """The structural schema of `model` with its CEL rules.

    `with_defaults=False` is for a status, whose writer says everything it knows: what is absent is unknown. Raises
    SchemaError naming the field if pydantic's schema holds a keyword that is not handled here.
    """
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs", {})
    _refuse_unknown_definitions(definitions)
    return _Converter(definitions, with_defaults).convert(schema, model.__name__)


def _refuse_unknown_definitions(definitions: Mapping[str, Any]) -> None:
    # pydantic qualifies the names of classes that clash; rules are found by plain class name.
    for name in definitions:
        if "__" in name:
            raise SchemaError(f"{name}: two models of the same name")


def _rules_of(class_name: str) -> tuple[Rule, ...]:
    return next((rules for model, rules in RULES.items() if model.__name__ == class_name), ())


class _Converter:
    """Holds the `$defs` of one pydantic schema while its nodes are converted."""

    def __init__(self, definitions: Mapping[str, Schema], with_defaults: bool) -> None:
        self._definitions = definitions
        self._with_defaults = with_defaults

    def convert(self, node: Schema, path: str) -> Schema:
        """The structural form of `node`. `path` names it in errors."""
        if "anyOf" in node:
            node = _unwrap_optional(node, path)
        if "$ref" in node:
            node = self._inline(node)
        if unknown := sorted(set(node) - set(_KEPT) - _TRANSLATED - _IMPLIED):
            raise SchemaError(f"{path}: keyword {unknown[0]} has no structural form here")
        if "type" not in node:
            raise SchemaError(f"{path}: has no type")
        if node["type"] == "integer":
            node = {**node, "format": _integer_format(node)}
        if "const" in node:
            node = {**node, "enum": [node["const"]]}
        if "description" in node:
            node = {**node, "description": " ".join(node["description"].split())}
        out = {key: node[key] for key in _KEPT if key in node}
        if self._with_defaults and "default" in node:
            out["default"] = _without_none(node["default"])
        out |= self._children(node, path)
        if "properties" in node and (rules := _rules_of(node["title"])):
            out["x-kubernetes-validations"] = [rule.to_schema() for rule in rules]
        return out

    def _children(self, node: Schema, path: str) -> Schema:
        """The keywords of `node` that hold schemas."""
        out: Schema = {}
        if "properties" in node:
            out["properties"] = {
                name: self.convert(child, f"{path}.{name}") for name, child in node["properties"].items()
            }
        if "items" in node:
            out["items"] = self.convert(node["items"], f"{path}[]")
        others = node.get("additionalProperties", False)
        if isinstance(others, dict):
            out["additionalProperties"] = self.convert(others, f"{path}.*")
        elif others:
            raise SchemaError(f"{path}: an open object must say so (see PodTemplate)")
        return out

    def _inline(self, node: Schema) -> Schema:
        """The definition that `node` refers to; what stands beside `$ref` (description, default) wins."""
        name = node["$ref"].removeprefix("#/$defs/")
        return {**self._definitions[name], **{key: value for key, value in node.items() if key != "$ref"}}


def _unwrap_optional(node: Schema, path: str) -> Schema:
    """`X | None = None` -> X: to Kubernetes an absent field is optional by not being required."""
    options = [option for option in node["anyOf"] if option != {"type": "null"}]
    if len(options) != 1 or len(options) == len(node["anyOf"]):
        raise SchemaError(f"{path}: a union has no structural form")
    beside = {key: value for key, value in node.items() if key not in {"anyOf", "title", "default"}}
    if node.get("default") is not None:
        raise SchemaError(f"{path}: an optional field must default to None")
    return {**options[0], **beside}


def _integer_format(node: Schema) -> str:
    fits = node.get("minimum", -_INT32_MAX) >= -_INT32_MAX and node.get("maximum", 2**63) <= _INT32_MAX
    return "int32" if fits else "int64"


def _without_none(value: Any) -> Any:
    """The default of an object with the defaults of its fields in it: rules of the object are checked against it."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
