"""The two Services: the address that clients use, and the name under which decode pods find prefill pods."""

from specserve_operator.constants import LABEL_TARGET_REVISION, PORT_HTTP
from specserve_operator.core.names import (
    Pool,
    gateway_name,
    object_labels,
    prefill_peers_name,
    selector,
)
from specserve_operator.core.objects import Manifest
from specserve_operator.render.metadata import Owner


def render_gateway_service(owner: Owner, port: int) -> Manifest:
    """Clients' address. Who wants it outside the cluster puts an Ingress or a Gateway before it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(gateway_name(owner.name), labels=object_labels(owner.name, Pool.GATEWAY)),
        "spec": {
            "type": "ClusterIP",
            "selector": selector(owner.name, Pool.GATEWAY),
            "ports": [{"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def render_prefill_peers(owner: Owner, target_revision: str) -> Manifest:
    """A name that resolves to the ready prefill pods of one target revision: the only ones a decode pod can use."""
    labels = object_labels(owner.name, Pool.PREFILL) | {LABEL_TARGET_REVISION: target_revision}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(prefill_peers_name(owner.name, target_revision), labels=labels),
        "spec": {
            "clusterIP": "None",
            "selector": selector(owner.name, Pool.PREFILL, target_revision=target_revision),
            "ports": [{"name": "http", "port": PORT_HTTP, "targetPort": "http", "protocol": "TCP"}],
        },
    }
