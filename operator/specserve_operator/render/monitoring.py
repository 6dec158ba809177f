"""Where the Prometheus operator finds the metrics of a service's pods."""

from typing import Any

from specserve_operator.constants import LABEL_POOL, LABEL_SERVICE
from specserve_operator.core.names import Pool, object_labels, pod_monitor_name
from specserve_operator.core.objects import Manifest
from specserve_operator.render.metadata import Owner


def render_pod_monitor(owner: Owner) -> Manifest:
    """One for all pools. Every series says of which namespace, service and pool it is."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": owner.metadata(pod_monitor_name(owner.name), labels=object_labels(owner.name)),
        "spec": {
            "selector": {"matchLabels": {LABEL_SERVICE: owner.name}},
            "podMetricsEndpoints": [
                # The gateway's port of that name has no metrics.
                _endpoint("http", {"action": "drop", "sourceLabels": [_meta(LABEL_POOL)], "regex": str(Pool.GATEWAY)}),
                _endpoint("metrics"),
            ],
        },
    }


def _endpoint(port: str, *first: dict[str, Any]) -> dict[str, Any]:
    labels = {
        "namespace": "__meta_kubernetes_namespace",
        "service": _meta(LABEL_SERVICE),
        "pool": _meta(LABEL_POOL),
    }
    relabelings = [{"action": "replace", "sourceLabels": [s], "targetLabel": t} for t, s in labels.items()]
    return {"port": port, "path": "/metrics", "relabelings": [*first, *relabelings]}


def _meta(pod_label: str) -> str:
    """The name under which Prometheus' service discovery has a label of a pod."""
    return "__meta_kubernetes_pod_label_" + "".join(c if c.isalnum() else "_" for c in pod_label)
