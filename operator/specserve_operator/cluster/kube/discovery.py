"""What the API server offers: which optional kinds there are, and whether the installed CRDs are ours.

Needs no permission beyond what every authenticated client has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve_operator.api.crd import DEFINITIONS, resource_schema
from specserve_operator.cluster.kube.client import ApiError, KubeClient
from specserve_operator.cluster.kube.kinds import OPTIONAL, Kind, is_own_group
from specserve_operator.cluster.kube.schema import Schema, missing_fields
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.constants import GROUP, VERSION

_SCHEMAS = "/openapi/v3"
_OWN_API = f"apis/{GROUP}/{VERSION}"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class InstalledCrds:
    """Our own CRDs as they are installed.

    `digest`: another one for other CRDs; empty while the API server does not show them. `problem`: what they lack of
    this version's; empty if nothing. `status_schemas`: by kind, those of statuses that lack something.
    """

    digest: str = ""
    problem: str = ""
    status_schemas: Mapping[str, Schema] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offer:
    """What may change while the operator runs: the optional kinds that there are, and our CRDs."""

    optional: tuple[Kind, ...] = ()
    crds: InstalledCrds = field(default_factory=InstalledCrds)


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


async def find_offer(client: KubeClient, known: Offer | None = None) -> Offer:
    """What there is now; `known` is what there was before. Two small requests where that is the same.

    Raises `ClusterError`.
    """
    optional = await find_kinds(client, OPTIONAL)
    return Offer(optional, await _find_crds(client, (known or Offer()).crds))


async def _find_crds(client: KubeClient, known: InstalledCrds) -> InstalledCrds:
    """Helm, for one, does not upgrade CRDs by itself."""
    shown = (await client.get(_SCHEMAS))["paths"].get(_OWN_API)
    # The address holds a digest of the schemas. It is not asked for under it: they may be others by now.
    digest = "" if shown is None else str(shown["serverRelativeURL"])
    if digest == known.digest:
        return known
    if not digest:
        return InstalledCrds()
    answer = await client.get(f"{_SCHEMAS}/{_OWN_API}")
    schemas = {_kind_name(schema): schema for schema in answer["components"]["schemas"].values()}
    missing = {
        definition.kind: list(missing_fields(resource_schema(definition), schemas.get(definition.kind, {})))
        for definition in DEFINITIONS
    }
    outdated = [kind for kind, paths in missing.items() if any(path.startswith(".status.") for path in paths)]
    return InstalledCrds(
        digest,
        _describe([f"{kind}{path}" for kind, paths in missing.items() for path in paths]),
        {kind: schemas[kind]["properties"]["status"] for kind in outdated},
    )


def _describe(missing: Sequence[str]) -> str:
    if not missing:
        return ""
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return f"the installed CRDs are older than the operator and lack {', '.join(missing[:_SHOWN])}{more}"


def _kind_name(schema: Mapping[str, Any]) -> str:
    kinds: Sequence[Mapping[str, Any]] = schema.get("x-kubernetes-group-version-kind") or ({},)
    return str(kinds[0].get("kind", ""))
