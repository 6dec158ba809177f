"""What the API server does with a custom resource, small: unknown fields, defaults, schema, list maps, CEL rules.

Built on a JSON-schema validator and a CEL interpreter, so that the generated schemas are judged by code that did not
make them.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import celpy
import jsonschema
from celpy import celtypes

Schema = dict[str, Any]


def admit(schema: Schema, obj: Any, old: Any = None) -> list[str]:
    """The errors, each with its path, for which a server with strict field validation refuses `obj`."""
    errors = [f"{path}: unknown field" for path in unknown_fields(schema, obj)]
    obj = with_defaults(schema, obj)
    validator = jsonschema.Draft202012Validator(
        _plain(schema), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    errors += [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in validator.iter_errors(obj)]
    if not errors:
        for path, node, value, before in _walk(schema, obj, old):
            errors += [f"{path}: {message}" for message in broken_rules(node, value, before)]
            errors += [f"{path}: doubled {key}" for key in _doubled_keys(node, value)]
    return errors


def broken_rules(schema: Schema, value: Any, old: Any = None) -> list[str]:
    """Messages of the rules on this node (not below it) that are false for `value`, which has its defaults."""
    return [
        rule["message"]
        for rule in schema.get("x-kubernetes-validations", [])
        if not ("oldSelf" in rule["rule"] and old is None) and not evaluate(rule["rule"], value, old)
    ]


def with_defaults(schema: Schema, value: Any) -> Any:
    """`value` with the schema's defaults filled in."""
    if isinstance(value, Mapping):
        filled = dict(value)
        for name, child in schema.get("properties", {}).items():
            if name not in filled and "default" in child:
                filled[name] = child["default"]
            if name in filled:
                filled[name] = with_defaults(child, filled[name])
        return filled
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    return value


def unknown_fields(schema: Schema, value: Any, path: str = "") -> list[str]:
    """Paths of the fields that the server would drop."""
    if isinstance(value, list):
        return [
            p for i, item in enumerate(value) for p in unknown_fields(schema.get("items", {}), item, f"{path}[{i}]")
        ]
    if not isinstance(value, Mapping) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    if path == ".metadata":
        return []
    found = []
    for name, item in value.items():
        child = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if child is None:
            found.append(f"{path}.{name}".removeprefix("."))
        else:
            found += unknown_fields(child, item, f"{path}.{name}")
    return found


def evaluate(expression: str, value: Any, old: Any = None) -> Any:
    """The value of a CEL expression with `self` and `oldSelf`, as a Python value. Raises celpy.CELEvalError."""
    activation = {"self": celpy.json_to_cel(value)}
    if old is not None:
        activation["oldSelf"] = celpy.json_to_cel(old)
    result = _program(expression).evaluate(activation)
    return bool(result) if isinstance(result, celtypes.BoolType) else str(result)


@cache
def _program(expression: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression), functions={"find": _find, "replace": _replace})


# Functions that Kubernetes adds to CEL.
def _find(text: Any, pattern: Any) -> Any:
    match = re.search(str(pattern), str(text))
    return celtypes.StringType(match[0] if match else "")


def _replace(text: Any, old: Any, new: Any) -> Any:
    return celtypes.StringType(str(text).replace(str(old), str(new)))


def _walk(schema: Schema, value: Any, old: Any, path: str = "") -> Iterator[tuple[str, Schema, Any, Any]]:
    yield path.removeprefix("."), schema, value, old
    if isinstance(value, Mapping):
        for name, item in value.items():
            child = schema.get("properties", {}).get(name)
            if child is not None:
                before = old.get(name) if isinstance(old, Mapping) else None
                yield from _walk(child, item, before, f"{path}.{name}")
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _walk(schema["items"], item, None, f"{path}[{index}]")


def _doubled_keys(schema: Schema, value: Any) -> list[str]:
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys:
        return []
    identities = [str([item[key] for key in keys]) for item in value]
    return sorted({identity for identity in identities if identities.count(identity) > 1})


def _plain(schema: Any) -> Any:
    """The schema without Kubernetes' own keywords and formats, which JSON-schema validators do not know."""
    if isinstance(schema, Mapping):
        return {
            key: _plain(item)
            for key, item in schema.items()
            if not str(key).startswith("x-kubernetes-") and not (key == "format" and item in {"int32", "int64"})
        }
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema
