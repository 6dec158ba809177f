"""The kinds of objects that the operator reads and writes: their paths in the API, and what is watched of each."""

from collections.abc import Callable
from dataclasses import dataclass

from specserve_operator.constants import API_VERSION, GROUP, MANAGED_BY
from specserve_operator.core.names import LABEL_MANAGED_BY
from specserve_operator.core.objects import Manifest, ObjectRef

# Of children only ours are watched: in a large cluster, all pods would not fit into the operator's memory.
OWNED_SELECTOR = f"{LABEL_MANAGED_BY}={MANAGED_BY}"


def _without_managed_fields(obj: Manifest) -> Manifest:
    return obj | {"metadata": {k: v for k, v in obj["metadata"].items() if k != "managedFields"}}


def _pod_essentials(obj: Manifest) -> Manifest:
    """A pod is mostly its template, which is known from its Deployment. What tells one from another is kept."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    kept_status = ("phase", "reason", "message", "podIP", "conditions", "containerStatuses", "initContainerStatuses")
    essentials = {
        "spec": {k: spec[k] for k in ("nodeName", "serviceAccountName") if k in spec},
        "status": {k: status[k] for k in kept_status if k in status},
    }
    return _without_managed_fields(obj) | essentials


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of namespaced objects.

    `selector`: which of them are watched. `slim`: what is remembered of one. `is_optional`: its API may be missing.
    """

    api_version: str
    name: str
    plural: str
    selector: str = OWNED_SELECTOR
    slim: Callable[[Manifest], Manifest] = _without_managed_fields
    is_optional: bool = False

    @property
    def group(self) -> str:
        """Empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def whole(self, obj: Manifest) -> Manifest:
        """An object with what lists leave out: its kind."""
        return {"apiVersion": self.api_version, "kind": self.name} | obj

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of an object, or of the collection in a namespace or, without one, in the cluster."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [self.plural, *(part for part in (name, subresource) if part is not None)]
        return "/".join(parts)


SERVICE = Kind(API_VERSION, "SpeculativeService", "speculativeservices", selector="")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
POD = Kind("v1", "Pod", "pods", slim=_pod_essentials)
EVENT = Kind("v1", "Event", "events")
SECRET = Kind("v1", "Secret", "secrets")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", is_optional=True)

_RBAC = "rbac.authorization.k8s.io/v1"
WATCHED: tuple[Kind, ...] = (
    SERVICE,
    Kind(API_VERSION, "PoolScaler", "poolscalers"),
    DEPLOYMENT,
    Kind("apps/v1", "ControllerRevision", "controllerrevisions"),
    Kind("v1", "Service", "services"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    POD,
    Kind(_RBAC, "Role", "roles"),
    Kind(_RBAC, "RoleBinding", "rolebindings"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    POD_MONITOR,
)
# What other projects define: it may be missing, come and go. Only listed: kopf ends with a watch of what is gone.
OPTIONAL: tuple[Kind, ...] = tuple(kind for kind in WATCHED if kind.is_optional)
_BY_NAME = {(kind.api_version, kind.name): kind for kind in (*WATCHED, EVENT, SECRET)}


def kind_of(ref: ObjectRef) -> Kind:
    """Raises KeyError for a kind that the operator has nothing to do with."""
    return _BY_NAME[ref.api_version, ref.kind]


def is_own_group(kind: Kind) -> bool:
    """True for the kinds that this project defines."""
    return kind.group == GROUP
