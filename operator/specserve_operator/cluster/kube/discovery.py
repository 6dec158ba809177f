"""What the API server offers: which optional kinds there are, and whether the installed CRDs are ours.

Needs no permission beyond what every authenticated client has.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specserve_operator.api.crd import DEFINITIONS, resource_schema
from specserve_operator.cluster.kube.client import ApiError, KubeClient
from specserve_operator.cluster.kube.kinds import Kind, is_own_group
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.constants import GROUP, VERSION

_SHOWN = 5


async def find_kinds(client: KubeClient, kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Those of `kinds` that the API server has. Raises `ClusterError` if one that is needed is missing."""
    served: dict[str, set[str]] = {}
    for api_version in dict.fromkeys(kind.api_version for kind in kinds):
        path = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        try:
            answer = await client.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            answer = {"resources": ()}
        served[api_version] = {resource["name"] for resource in answer["resources"]}
    found = tuple(kind for kind in kinds if kind.plural in served[kind.api_version])
    for kind in kinds:
        if kind not in found and not kind.is_optional:
            hint = "install the CRDs of this version (crds/ or the chart)" if is_own_group(kind) else "it is needed"
            raise ClusterError(f"the API server has no {kind.plural} of {kind.api_version}: {hint}", retryable=False)
    return found


async def find_crd_problem(client: KubeClient) -> str:
    """What the installed CRDs lack of this version's; empty if nothing. Helm, for one, does not upgrade CRDs itself."""
    answer = await client.get(f"/openapi/v3/apis/{GROUP}/{VERSION}")
    schemas = {_kind_name(schema): schema for schema in answer["components"]["schemas"].values()}
    missing = [
        f"{definition.kind}{path}"
        for definition in DEFINITIONS
        for path in _missing_fields(resource_schema(definition), schemas.get(definition.kind, {}))
    ]
    if not missing:
        return ""
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return f"the installed CRDs are older than the operator and lack {', '.join(missing[:_SHOWN])}{more}"


def _kind_name(schema: Mapping[str, Any]) -> str:
    kinds: Sequence[Mapping[str, Any]] = schema.get("x-kubernetes-group-version-kind") or ({},)
    return str(kinds[0].get("kind", ""))


def _missing_fields(wanted: Mapping[str, Any], found: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of properties that `wanted` has and `found` lacks; not those below one that is lacking itself."""
    found_properties = found.get("properties") or {}
    for name, schema in (wanted.get("properties") or {}).items():
        if not path and name in ("apiVersion", "kind", "metadata"):
            continue
        if name not in found_properties:
            yield f"{path}.{name}"
        else:
            yield from _missing_fields(schema, found_properties[name], f"{path}.{name}")
    if "items" in wanted:
        yield from _missing_fields(wanted["items"], found.get("items") or {}, f"{path}[]")
