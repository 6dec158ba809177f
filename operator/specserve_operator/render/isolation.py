"""Who may connect to the pods of each pool: only those that have business with them. Probes come from the node.

Policies add up, so whoever else is to be let in (a scraper of metrics, a debugger) gets a policy of their own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from specserve_operator.constants import PORT_CONTROL, PORT_GATEWAY_METRICS, PORT_HTTP, PORT_KV
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.names import Pool, network_policy_name, object_labels, selector
from specserve_operator.core.objects import Manifest
from specserve_operator.identity.names import PORT_HTTPS
from specserve_operator.render.metadata import Owner

OPERATOR_APP = "specserve-operator"
PROMETHEUS_APP = "prometheus"
# One port for each tensor-parallel rank, from the first on.
_KV_RANKS = 64

_APP_LABEL, _NAMESPACE_LABEL = "app.kubernetes.io/name", "kubernetes.io/metadata.name"
_Rule = dict[str, Any]


def render_network_policy(owner: Owner, pool: Pool, config: OperatorConfig) -> Manifest:
    """What may come in to the pods of a pool, of any revision. What goes out is left open."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owner.metadata(network_policy_name(owner.name, pool), labels=object_labels(owner.name, pool)),
        "spec": {
            "podSelector": {"matchLabels": selector(owner.name, pool)},
            "policyTypes": ["Ingress"],
            "ingress": list(_ingress(owner, pool, config)),
        },
    }


def _ingress(owner: Owner, pool: Pool, config: OperatorConfig) -> Iterator[_Rule]:
    match pool:
        case Pool.GATEWAY:
            yield {"ports": [_port(PORT_HTTP), _port(PORT_GATEWAY_METRICS)]}
            return
        case Pool.PREFILL:
            ports = [_port(PORT_HTTP), _port(PORT_HTTPS), _port(PORT_KV) | {"endPort": PORT_KV + _KV_RANKS - 1}]
            yield {"from": [_pods(selector(owner.name, Pool.DECODE))], "ports": ports}
        case Pool.DECODE:
            yield {"from": [_pods(selector(owner.name, Pool.GATEWAY))], "ports": [_port(PORT_HTTP)]}
    yield {"from": [_operator(config)], "ports": [_port(PORT_CONTROL)]}
    if config.pod_monitors:
        # Their metrics are on the port of their API.
        yield {"from": [_pods({_APP_LABEL: PROMETHEUS_APP}) | {"namespaceSelector": {}}], "ports": [_port(PORT_HTTP)]}


def _operator(config: OperatorConfig) -> _Rule:
    """The operator's pods; in any namespace where it does not know its own."""
    own = {"matchLabels": {_NAMESPACE_LABEL: config.operator_namespace}} if config.operator_namespace else {}
    return {"namespaceSelector": own} | _pods({_APP_LABEL: OPERATOR_APP})


def _pods(labels: Mapping[str, str]) -> _Rule:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _port(number: int) -> _Rule:
    return {"protocol": "TCP", "port": number}
