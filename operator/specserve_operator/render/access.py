"""What the gateway may do: read the pods of its own namespace, to find the decode pods."""

from specserve_operator.core.names import Pool, gateway_name, object_labels
from specserve_operator.core.objects import Manifest
from specserve_operator.render.metadata import Owner

_RBAC = "rbac.authorization.k8s.io"


def render_gateway_access(owner: Owner) -> list[Manifest]:
    """ServiceAccount, Role and RoleBinding of the gateway's pods."""
    name = gateway_name(owner.name)
    metadata = owner.metadata(name, labels=object_labels(owner.name, Pool.GATEWAY))
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    role = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": metadata,
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    }
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}],
    }
    return [account, role, binding]
