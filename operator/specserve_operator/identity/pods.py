"""Whether a pod may have a certificate, and which pods have one: judged by what the cluster says of them. Pure.

A namespace is the boundary. Who may create pods in it can make one that looks like any other, and could read its
secrets anyway; certificates name the namespace, so it gets nothing from another one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from specserve_operator.constants import ENGINE_CONTAINER, LABEL_POOL, LABEL_REVISION, LABEL_SERVICE
from specserve_operator.identity.names import CERTIFIED_POOLS, FLAG_IDENTITY_SERVER, PodId
from specserve_operator.identity.tokens import PodClaims

Manifest = Mapping[str, Any]
# The object of a name in the pod's namespace; None if there is none.
Find = Callable[[str], Manifest | None]

_ENDED: Final = frozenset({"Succeeded", "Failed"})


class PodRefusedError(Exception):
    """A pod that gets no certificate. The message says what is in the way."""


def certified_pod_id(claims: PodClaims, pod: Manifest, *, find_service: Find, find_deployment: Find) -> PodId:
    """Who a pod is. Its token has proved that it is the pod `claims`; `pod` is the pod of that name.

    It must run, belong to a workload of its service, and that workload must be one with certificates. Nothing is looked
    up for a pod that can be refused without. Raises `PodRefusedError`.
    """
    meta, labels = pod["metadata"], pod["metadata"].get("labels") or {}
    if meta.get("uid") != claims.pod_uid:
        raise PodRefusedError(f"pod {claims.pod_name} is another one by now")
    if (pod.get("status") or {}).get("phase") in _ENDED:
        raise PodRefusedError(f"pod {claims.pod_name} has ended")
    name, pool, revision = (labels.get(key, "") for key in (LABEL_SERVICE, LABEL_POOL, LABEL_REVISION))
    if not name or pool not in CERTIFIED_POOLS:
        raise PodRefusedError(f"pod {claims.pod_name} is in no pool whose pods get certificates")
    service = find_service(name)
    if service is None:
        raise PodRefusedError(f"there is no SpeculativeService {name}")
    deployment = find_deployment(_controller(pod, "ReplicaSet").rpartition("-")[0])
    if deployment is None or not _is_certified(deployment, service, pool, revision):
        raise PodRefusedError(f"pod {claims.pod_name} belongs to no workload of {name} with certificates")
    try:
        return PodId(namespace=claims.namespace, service=name, pool=pool, uid=claims.pod_uid)
    except ValueError as error:
        raise PodRefusedError(str(error)) from error


def certified_revisions(owned: Iterable[Manifest]) -> frozenset[tuple[str, str]]:
    """Pool and revision of every workload whose pods have certificates: those answer to nobody without one."""
    return frozenset(
        (labels.get(LABEL_POOL, ""), labels.get(LABEL_REVISION, ""))
        for obj in owned
        if obj["kind"] == "Deployment" and expects_certificates(obj)
        for labels in (obj["metadata"].get("labels") or {},)
    )


def expects_certificates(deployment: Manifest) -> bool:
    """Whether the pods of a Deployment are told to get certificates."""
    template = (deployment.get("spec") or {}).get("template") or {}
    containers = (template.get("spec") or {}).get("containers") or ()
    return any(c.get("name") == ENGINE_CONTAINER and FLAG_IDENTITY_SERVER in (c.get("args") or ()) for c in containers)


def _is_certified(deployment: Manifest, service: Manifest, pool: str, revision: str) -> bool:
    labels = deployment["metadata"].get("labels") or {}
    owners = deployment["metadata"].get("ownerReferences") or ()
    is_owned = any(owner.get("uid") == service["metadata"].get("uid") for owner in owners)
    found = tuple(labels.get(key) for key in (LABEL_SERVICE, LABEL_POOL, LABEL_REVISION))
    return is_owned and found == (service["metadata"]["name"], pool, revision) and expects_certificates(deployment)


def _controller(pod: Manifest, kind: str) -> str:
    """Name of the object of that kind that controls the pod; empty if there is none."""
    for owner in pod["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == kind:
            return str(owner.get("name", ""))
    return ""
