"""Who may connect to whom under the rendered NetworkPolicies, judged as a network plugin does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.names import Pool
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import plan
from specserve_operator.render import render
from tests.unit.core.builders import CONFIG, deployments_of, disaggregated, make_snapshot, ready_children

HTTP, HTTPS, CONTROL, KV, METRICS = 8000, 8443, 9000, 9100, 29000
IN_CLUSTER = replace(CONFIG, operator_namespace="specserve-system")


@dataclass(frozen=True)
class Peer:
    namespace: str
    labels: Mapping[str, str]


OPERATOR = Peer("specserve-system", {"app.kubernetes.io/name": "specserve-operator"})
IMPOSTOR = Peer("llm", {"app.kubernetes.io/name": "specserve-operator"})
STRANGER = Peer("llm", {"app": "notebook"})
PROMETHEUS = Peer("monitoring", {"app.kubernetes.io/name": "prometheus"})


def objects(config: OperatorConfig = IN_CLUSTER) -> list[Manifest]:
    return render(plan(make_snapshot(disaggregated(), config=config)))


def pod(pool: str, *, service: str = "coder", namespace: str = "llm") -> Peer:
    (deployment,) = deployments_of(objects(), pool)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    return Peer(namespace, {**labels, "specserve.dev/service": service})


def is_allowed(policies: Sequence[Manifest], source: Peer, target: Peer, port: int) -> bool:
    """A pod that no policy selects is open; to others, any rule of any policy that selects them lets in."""
    selecting = [
        p["spec"]
        for p in policies
        if p["metadata"]["namespace"] == target.namespace and matches(p["spec"]["podSelector"], target.labels)
    ]
    assert all(spec["policyTypes"] == ["Ingress"] for spec in selecting)
    rules = [rule for spec in selecting for rule in spec["ingress"]]
    return not selecting or any(lets_in(rule, source, target, port) for rule in rules)


def lets_in(rule: Mapping[str, Any], source: Peer, target: Peer, port: int) -> bool:
    is_port = any(p["protocol"] == "TCP" and p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])
    return is_port and ("from" not in rule or any(is_peer(peer, source, target) for peer in rule["from"]))


def is_peer(peer: Mapping[str, Any], source: Peer, target: Peer) -> bool:
    if "namespaceSelector" in peer:
        is_namespace = matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
    else:
        is_namespace = source.namespace == target.namespace
    return is_namespace and matches(peer["podSelector"], source.labels)


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def policies(config: OperatorConfig = IN_CLUSTER) -> list[Manifest]:
    return [obj for obj in objects(config) if obj["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize(
    ("source", "target", "ports"),
    [
        (pod("decode"), "prefill", {HTTP, HTTPS, KV}),
        (pod("gateway"), "decode", {HTTP}),
        (OPERATOR, "prefill", {CONTROL}),
        (OPERATOR, "decode", {CONTROL}),
        (STRANGER, "gateway", {HTTP, METRICS}),
        (PROMETHEUS, "gateway", {HTTP, METRICS}),
        (STRANGER, "prefill", set()),
        (STRANGER, "decode", set()),
        (PROMETHEUS, "decode", set()),
        (IMPOSTOR, "decode", set()),
        (pod("gateway"), "prefill", set()),
        (pod("prefill"), "decode", set()),
        (pod("decode"), "decode", set()),
        (pod("decode", service="other"), "prefill", set()),
        (pod("gateway", service="other"), "decode", set()),
        (pod("decode", namespace="elsewhere"), "prefill", set()),
    ],
)
def test_a_pod_is_reached_by_those_that_have_business_with_it(source: Peer, target: str, ports: set[int]) -> None:
    found = {p for p in (HTTP, HTTPS, CONTROL, KV, METRICS) if is_allowed(policies(), source, pod(target), p)}
    assert found == ports


def test_every_rank_of_a_tensor_parallel_prefill_pod_can_be_pulled_from() -> None:
    assert all(is_allowed(policies(), pod("decode"), pod("prefill"), KV + rank) for rank in range(64))
    assert not is_allowed(policies(), pod("decode"), pod("prefill"), KV + 64)


def test_prometheus_reaches_the_pods_that_it_is_told_to_scrape() -> None:
    monitored = policies(replace(IN_CLUSTER, pod_monitors=True))
    for target in ("prefill", "decode"):
        assert is_allowed(monitored, PROMETHEUS, pod(target), HTTP)
        assert not is_allowed(monitored, PROMETHEUS, pod(target), CONTROL)
        assert not is_allowed(monitored, STRANGER, pod(target), HTTP)


def test_an_operator_that_does_not_know_its_namespace_is_let_in_from_any() -> None:
    unknown = policies(replace(CONFIG, operator_namespace=""))
    assert is_allowed(unknown, OPERATOR, pod("decode"), CONTROL)
    assert not is_allowed(unknown, STRANGER, pod("decode"), CONTROL)


def test_each_pool_has_one_policy_for_all_its_revisions() -> None:
    assert {p["metadata"]["name"] for p in policies()} == {"coder-prefill", "coder-decode", "coder-gateway"}
    for policy in policies():
        assert set(policy["spec"]["podSelector"]["matchLabels"]) == {"specserve.dev/service", "specserve.dev/pool"}


@pytest.mark.parametrize("config", [replace(CONFIG, network_policies=False), replace(CONFIG, local=True)])
def test_where_policies_are_not_wanted_there_are_none_and_old_ones_go(config: OperatorConfig) -> None:
    assert policies(config) == []
    children = ready_children(disaggregated())
    deleted = plan(make_snapshot(disaggregated(), children, config=config)).deletions
    assert {ref.name for ref in deleted if ref.kind == "NetworkPolicy"} == {f"coder-{pool}" for pool in Pool}


def test_the_policy_of_a_pool_that_left_the_spec_goes_with_it() -> None:
    children = ready_children(disaggregated())
    deleted = plan(make_snapshot(disaggregated(prefill=None), children)).deletions
    assert [ref.name for ref in deleted if ref.kind == "NetworkPolicy"] == ["coder-prefill"]
