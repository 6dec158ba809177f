"""Schemas of resources: what one lacks of another's, and values without what a schema does not know. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

# Every resource has them, and the API server describes them in its own way.
_COMMON = ("apiVersion", "kind", "metadata")
_OPEN = "x-kubernetes-preserve-unknown-fields"


def missing_fields(wanted: Schema, found: Schema, path: str = "") -> Iterator[str]:
    """Paths of properties that `wanted` has and `found` lacks; not those below one that is lacking itself."""
    found_properties = found.get("properties") or {}
    for name, schema in (wanted.get("properties") or {}).items():
        if not path and name in _COMMON:
            continue
        if name not in found_properties:
            yield f"{path}.{name}"
        else:
            yield from missing_fields(schema, found_properties[name], f"{path}.{name}")
    if "items" in wanted:
        yield from missing_fields(wanted["items"], found.get("items") or {}, f"{path}[]")


def prune_to(schema: Schema, value: Any) -> Any:
    """`value` without the fields that `schema` does not declare: server-side apply refuses an object for one of them,
    where other writes would drop it."""
    if isinstance(value, list):
        return [prune_to(schema.get("items") or {}, item) for item in value]
    if not isinstance(value, dict) or schema.get(_OPEN):
        return value
    declared, others = schema.get("properties") or {}, schema.get("additionalProperties")
    if isinstance(others, Mapping):
        return {key: prune_to(others, item) for key, item in value.items()}
    if others or not declared:
        return value  # a plain object, whose fields nobody declares
    return {key: prune_to(declared[key], item) for key, item in value.items() if key in declared}
