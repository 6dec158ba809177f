"""Whom the operator's pods may talk to, where network policies are enforced."""

from typing import Any

from specserve_operator.constants import MANAGED_BY, PORT_CONTROL
from specserve_operator.core.names import LABEL_MANAGED_BY
from tests.chart.rendering import Manifest, Release, of_kind, only, operator_container, render


def _policy(values: dict[str, Any]) -> Manifest:
    policy: Manifest = only(render(Release(values)), "NetworkPolicy")["spec"]
    return policy


def _by_port(rules: list[Manifest], peers: str) -> dict[int | str, Any]:
    """Peers by port; None stands for anyone."""
    return {port["port"]: rule.get(peers) for rule in rules for port in rule["ports"]}


SERVICE_PODS = [{"podSelector": {"matchLabels": {LABEL_MANAGED_BY: MANAGED_BY}}, "namespaceSelector": {}}]


def test_pods_of_services_reach_the_certificates_and_anyone_the_probes() -> None:
    ingress = _by_port(_policy({})["ingress"], "from")
    assert ingress == {"identity": SERVICE_PODS, "health": None, "metrics": None}
    names = {port["name"] for port in operator_container(render(Release()))["ports"]}
    assert set(ingress) == names


def test_the_operator_reaches_control_ports_dns_and_the_api_server_only() -> None:
    assert _by_port(_policy({})["egress"], "to") == {
        PORT_CONTROL: SERVICE_PODS,
        53: None,
        5353: None,
        443: None,
        6443: None,
        8443: None,
        16443: None,
    }


def test_the_policy_is_about_the_operators_pods_and_both_directions() -> None:
    policy = _policy({})
    assert policy["podSelector"]["matchLabels"] == only(render(Release()), "Service")["spec"]["selector"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_pods_of_namespaces_that_are_not_watched_are_strangers() -> None:
    policy = _policy({"watch": {"namespaces": ["team-a", "team-b"]}})
    expected = [
        {
            "podSelector": {"matchLabels": {LABEL_MANAGED_BY: MANAGED_BY}},
            "namespaceSelector": {
                "matchExpressions": [
                    {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "team-b"]}
                ]
            },
        }
    ]
    assert _by_port(policy["ingress"], "from")["identity"] == expected
    assert _by_port(policy["egress"], "to")[PORT_CONTROL] == expected


def test_metrics_and_the_api_server_can_be_narrowed() -> None:
    prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    policy = _policy(
        {"networkPolicy": {"metricsFrom": prometheus, "apiServer": {"ports": [6443], "cidrs": ["10.0.0.1/32"]}}}
    )
    assert _by_port(policy["ingress"], "from")["metrics"] == prometheus
    egress = _by_port(policy["egress"], "to")
    assert egress[6443] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    assert 443 not in egress


def test_there_can_be_no_policy() -> None:
    assert not of_kind(render(Release({"networkPolicy": {"enabled": False}})), "NetworkPolicy")
