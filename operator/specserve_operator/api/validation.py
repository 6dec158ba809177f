"""From YAML text to checked resources, with errors that name the file, the document, the field and what to do.

`parse_manifests` is for files, `parse_service` for one object. A user of `specserve up` has no API server, so what that
would refuse is refused here, in the same terms.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specserve_operator.api import pools
from specserve_operator.api import v1alpha1 as api
from specserve_operator.constants import API_VERSION

_MODEL_URI_FORMS: Final = "hf://org/name@commit, s3://..., oci://..., pvc://claim/path or file:///absolute/path"
_PATTERNS: Final = {
    api.MODEL_URI_PATTERN: _MODEL_URI_FORMS,
    pools.STORAGE_URI_PATTERN: "pvc://claim/path, s3://bucket/path or file:///absolute/path",
    api.DRAFT_URI_PATTERN: "pvc://claim/path, s3://bucket/path, hf://org/name@commit or file:///absolute/path",
    api.SERVICE_NAME_PATTERN: "a letter first, then lower-case letters, digits and '-'",
    api.CLASS_NAME_PATTERN: "lower-case letters, digits and '-'",
    api.SHA256_PATTERN: "64 hexadecimal digits",
    pools.BYTES_PER_SECOND_PATTERN: "a number of bytes, like 50Mi",
}
# Fields that hold a URI, from the root.
_URI_FIELDS: Final = (
    ("spec", "model", "uri"),
    ("spec", "speculation", "draft", "uri"),
    ("spec", "training", "storage", "uri"),
)
_RELATIVE_PREFIXES: Final = ("file://./", "file://../")
_LONGEST_VALUE_SHOWN: Final = 80

ResourceT = TypeVar("ResourceT", bound=api.Resource)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `path` is the field in YAML terms (`spec.decode.replicas`), or empty for the whole."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidManifest(ValueError):  # noqa: N818 - reads as what the user is told
    """A manifest that cannot be used. `str()` has one line per problem, each complete in itself.

    `source` names the file, and the document where there are several, and is empty for an object that came otherwise.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(f"{prefix}{problem}" for problem in self.problems))


def parse_service(manifest: Mapping[str, Any], source: str = "") -> api.SpeculativeService:
    """The SpeculativeService in `manifest`. Raises InvalidManifest with every problem that was found."""
    return _parse(api.SpeculativeService, manifest, source)


def parse_manifests(text: str, source: str, base_dir: Path | None = None) -> list[api.SpeculativeService]:
    """All SpeculativeServices of a YAML file.

    `source` is the file's name, for errors. With `base_dir`, the manifest's folder, relative `file://./` URIs are made
    absolute. Raises InvalidManifest if the text is no YAML, holds no service, two of one name, or an invalid one.
    """
    manifests = load_manifests(text, source)
    services: dict[tuple[str, str], api.SpeculativeService] = {}
    for index, loaded in enumerate(manifests):
        where = source if len(manifests) == 1 else f"{source}, document {index + 1}"
        manifest = loaded if base_dir is None else resolve_relative_uris(loaded, base_dir)
        service = parse_service(manifest, where)
        key = (service.metadata.namespace, service.metadata.name)
        if key in services:
            raise InvalidManifest([Problem("metadata.name", f"{key[1]} is there twice")], where)
        services[key] = service
    if not services:
        raise InvalidManifest([Problem("", "holds no SpeculativeService")], source)
    return list(services.values())


def load_manifests(text: str, source: str) -> list[dict[str, Any]]:
    """The documents of a YAML (or JSON) text that are not empty, unchecked but for being objects.

    Raises InvalidManifest with line and column where the text is no YAML or a key stands twice.
    """
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise InvalidManifest([Problem("", f"not valid YAML: {error.problem or error.context}")], where) from error
    except yaml.YAMLError as error:
        raise InvalidManifest([Problem("", f"not valid YAML: {str(error).splitlines()[0]}")], source) from error
    for index, document in enumerate(documents):
        if not isinstance(document, dict):
            where = source if len(documents) == 1 else f"{source}, document {index + 1}"
            raise InvalidManifest([Problem("", f"must be an object, got {_shown(document)}")], where)
    return documents


def resolve_relative_uris(manifest: Mapping[str, Any], base_dir: Path) -> dict[str, Any]:
    """A copy of `manifest` in which `file://./path` and `file://../path` are absolute, read from folder `base_dir`.

    Only where a URI belongs, and only these two forms: everything else, valid or not, stays as it is.
    """
    resolved: dict[str, Any] = dict(manifest)
    for fields in _URI_FIELDS:
        *parents, last = fields
        node: Any = resolved
        for name in parents:
            child = node.get(name)
            if not isinstance(child, Mapping):
                break
            node[name] = dict(child)
            node = node[name]
        else:
            uri = node.get(last)
            if isinstance(uri, str) and uri.startswith(_RELATIVE_PREFIXES):
                node[last] = f"file://{(base_dir / uri.removeprefix('file://')).resolve()}"
    return resolved


def _parse(model: type[ResourceT], manifest: Mapping[str, Any], source: str) -> ResourceT:
    problems = _identity_problems(model, manifest)
    if problems:
        raise InvalidManifest(problems, source)
    # By way of JSON, in whose strict mode types are those of the API server: no "3" for 3, but lists for tuples.
    try:
        return model.model_validate_json(
            json.dumps(_without_nulls(manifest)), strict=True, by_alias=True, by_name=False
        )
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
        raise InvalidManifest([_problem(model, detail) for detail in details], source) from None
    except (TypeError, ValueError) as error:
        raise InvalidManifest([Problem("", f"holds a value that JSON cannot express: {error}")], source) from error


def _identity_problems(model: type[api.Resource], manifest: Mapping[str, Any]) -> list[Problem]:
    """What keeps a manifest from being looked at as a `model` at all."""
    kind = model.__name__
    for name, wanted in (("apiVersion", API_VERSION), ("kind", kind)):
        if name not in manifest:
            return [Problem(name, f"is missing; must be {wanted}")]
        if manifest[name] != wanted:
            return [Problem(name, f"must be {wanted}, got {_shown(manifest[name])}")]
    if not isinstance(manifest.get("metadata"), Mapping):
        return [Problem("metadata.name", "is missing")]
    return []


def _problem(model: type[api.Resource], detail: ErrorDetails) -> Problem:
    """A pydantic error in terms of the manifest."""
    location, kind, value = detail["loc"], detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        message = "unknown field" + _suggestion(model, location)
    elif kind == "missing":
        message = "is missing"
    elif kind == "value_error":
        message = str(context["error"])
    elif kind == "string_pattern_mismatch" and context["pattern"] in _PATTERNS:
        message = f"must be {_PATTERNS[context['pattern']]}, got {_shown(value)}"
    else:
        message = f"{detail['msg']}, got {_shown(value)}"
        if kind in {"enum", "string_type"} and isinstance(value, bool):
            message += " (YAML reads on, off, yes and no as booleans: quote the word)"
    return Problem(_dotted(location), message)


def _dotted(location: Sequence[int | str]) -> str:
    """`("spec", "classes", 0, "name")` -> `spec.classes[0].name`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")


def _suggestion(model: type[api.Resource], location: Sequence[int | str]) -> str:
    """The known field that was probably meant by the unknown one at `location`."""
    *parents, unknown = location
    close = difflib.get_close_matches(str(unknown), _field_names(model, parents), n=1, cutoff=0.65)
    return f" (did you mean {close[0]}?)" if close else ""


def _field_names(model: type[api.Resource], location: Sequence[int | str]) -> list[str]:
    """Names of the fields of the object at `location`, as they are written in YAML."""
    schema = _json_schema(model)
    node = schema
    for step in location:
        node = node.get("items", {}) if isinstance(step, int) else node.get("properties", {}).get(step, {})
        options = [node, *node.get("anyOf", [])]
        reference = next((option["$ref"] for option in options if "$ref" in option), None)
        if reference:
            node = schema["$defs"][reference.removeprefix("#/$defs/")]
    return list(node.get("properties", {}))


@cache
def _json_schema(model: type[api.Resource]) -> dict[str, Any]:
    return model.model_json_schema(by_alias=True)


def _shown(value: Any) -> str:
    """`value` as YAML would write it on one line, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE_SHOWN else f"{text[: _LONGEST_VALUE_SHOWN - 3]}..."


def _without_nulls(value: Any) -> Any:
    """`value` without fields that are null, which the API server drops too; pod templates stay as they are."""
    if isinstance(value, Mapping):
        return {
            key: item if key == "template" else _without_nulls(item) for key, item in value.items() if item is not None
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


class _Loader(yaml.SafeLoader):
    """Reads YAML as kubectl does: a doubled key is an error, and dates stay strings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:str" and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value} stands twice", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key.value, str) else "")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
