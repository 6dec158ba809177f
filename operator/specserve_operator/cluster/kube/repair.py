"""Puts right an object that an apply cannot: one where a change by somebody else excludes ours.

An apply adds our fields and leaves those of others, so where the two exclude each other (a literal value beside a
`valueFrom`, another source for a volume, a port under the name of ours) the API server refuses the result.
"""

import logging

from specserve_operator.cluster.kube.client import JSON_PATCH, MERGE_PATCH, ApiError, KubeClient
from specserve_operator.cluster.kube.kinds import Kind
from specserve_operator.core.objects import Manifest

_LOG = logging.getLogger(__name__)

_MANAGER = "specserve-repair"
_HEADER = ("apiVersion", "kind", "metadata")
_TRIES = 5
_CONFLICT = 409


async def overwrite(client: KubeClient, kind: Kind, obj: Manifest, *, manager: str) -> Manifest:
    """Replaces everything but the metadata of an object, then applies `obj`. Returns the object as it is then.

    What others have set there is lost. Raises `ApiError`, also where it is `obj` itself that is refused.
    """
    meta = obj["metadata"]
    path = kind.path(meta["namespace"], meta["name"])
    parts = [{"op": "add", "path": f"/{part}", "value": value} for part, value in obj.items() if part not in _HEADER]
    query = {"fieldManager": _MANAGER}
    _, replaced = await client.request("PATCH", path, query=query, body=parts, headers={"Content-Type": JSON_PATCH})
    _LOG.warning(
        "%s %s/%s was overwritten: an apply could not put it right", kind.name, meta["namespace"], meta["name"]
    )
    await _disown(client, path, replaced)
    return await client.apply(kind, obj, manager=manager)


async def _disown(client: KubeClient, path: str, obj: Manifest) -> None:
    """Leaves the fields to the manager that applies them: with two owners, none of them would go with an apply."""
    for _ in range(_TRIES):
        meta = obj["metadata"]
        kept = [entry for entry in meta["managedFields"] if entry["manager"] != _MANAGER]
        patch = {"metadata": {"resourceVersion": meta["resourceVersion"], "managedFields": kept}}
        try:
            await client.request("PATCH", path, body=patch, headers={"Content-Type": MERGE_PATCH})
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            obj = await client.get(path)
        else:
            return
