"""The operator has the rights that the chart gives it, needs no others, and says which one is missing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.kube.errors import KubectlError
from tests.cluster.api import Object
from tests.cluster.operator_process import (
    NAMESPACE,
    OperatorOptions,
    OperatorProcess,
    chart_rules,
    install_rules,
    tracebacks,
    user_name,
)
from tests.cluster.site import Site, Tenant, service

pytestmark = pytest.mark.cluster

# What Kubernetes grants to everybody who is somebody.
EVERYBODY_MAY = {
    *(("authorization.k8s.io", f"selfsubject{what}", "create") for what in ("accessreviews", "rulesreviews")),
    ("authentication.k8s.io", "selfsubjectreviews", "create"),
}

Right = tuple[str, str, str]


def rights(rules: list[dict[str, Any]]) -> set[Right]:
    """API group, resource and verb of everything that rules allow for all names."""
    return {
        (group, resource, verb)
        for rule in rules
        if not rule.get("resourceNames")
        for group in rule.get("apiGroups") or ()
        for resource in rule.get("resources") or ()
        for verb in rule["verbs"]
    }


def rights_in(site: Site, kubeconfig: Path, namespace: str) -> set[Right]:
    """What a user may do in a namespace, as the API server sees it."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    text = site.control_plane.kubectl(
        "create", "--raw", path, "-f", "-", stdin=json.dumps(review), kubeconfig=kubeconfig
    )
    return rights(json.loads(text)["status"]["resourceRules"]) - EVERYBODY_MAY


def granted(documents: tuple[dict[str, Any], ...], *kinds: str) -> set[Right]:
    return {right for document in documents if document["kind"] in kinds for right in rights(document["rules"])}


def test_operator_may_do_what_the_chart_says_and_nothing_else(site: Site, tenant: Tenant) -> None:
    kubeconfig = install_rules(site.control_plane)
    everywhere = granted(chart_rules(), "ClusterRole")
    # What another test has granted may be in force for a moment yet.
    tenant.wait(
        lambda: rights_in(site, kubeconfig, NAMESPACE) == everywhere | granted(chart_rules(), "Role"),
        what="the operator has in its own namespace the rights that the chart gives it",
    )
    assert rights_in(site, kubeconfig, tenant.namespace) == everywhere
    assert not {right for right in everywhere if "*" in right or right[1] == "secrets"}


@pytest.mark.parametrize(
    "request_",
    [
        ("get", "secrets", "-A"),
        ("get", "secrets", "-n", NAMESPACE),
        ("get", "secret", "other", "-n", NAMESPACE),
        ("get", "nodes"),
        ("get", "namespaces"),
        ("get", "customresourcedefinitions"),
        ("get", "clusterroles"),
        ("delete", "pod", "any"),
        ("create", "namespace", "mine"),
        ("create", "token", "default"),
        ("create", "clusterrole", "mine", "--verb=get", "--resource=pods"),
        ("create", "role", "mine", "--verb=get", "--resource=secrets"),
        ("delete", "spsvc", "any"),
    ],
    ids=" ".join,
)
def test_operator_is_refused_what_it_does_not_need(site: Site, request_: tuple[str, ...]) -> None:
    kubeconfig = install_rules(site.control_plane)
    with pytest.raises(KubectlError, match=r"\(Forbidden\)|forbidden"):
        site.control_plane.kubectl(*request_, kubeconfig=kubeconfig)


class TestNamespacedInstall:
    """An operator for one namespace, with Roles only."""

    @pytest.fixture
    def home(self, tenant: Tenant) -> str:
        """The operator's own namespace."""
        return f"operator-{tenant.namespace[-6:]}"

    @pytest.fixture
    def watched(
        self, site: Site, tenant: Tenant, no_operator: None, home: str, tmp_path: Path
    ) -> Iterator[OperatorProcess]:
        """An operator for the tenant's namespace alone; not running yet."""
        kubeconfig = install_rules(site.control_plane, (tenant.namespace,), home)
        options = OperatorOptions(namespace=home, watched=(tenant.namespace,))
        with OperatorProcess(kubeconfig, tmp_path / "operator.log", options) as process:
            yield process
        site.api.delete("namespaces", None, home)

    def test_it_serves_its_namespace_and_leaves_others_alone(
        self, site: Site, tenant: Tenant, watched: OperatorProcess, home: str
    ) -> None:
        assert {d["kind"] for d in chart_rules((tenant.namespace,), home)} == {"Role", "RoleBinding"}
        other = site.new_namespace(f"{tenant.namespace}-other"[-60:].strip("-"))
        other.apply(service())
        watched.start()
        tenant.apply(service())
        tenant.wait_ready()
        tenant.change(engine={"image": "engine:b"})
        tenant.wait_ready()
        assert other.children() == {}
        assert other.status() == {}
        events = [e for e in site.control_plane.audit_events() if e.user == user_name(home) and e.resource]
        assert {e.namespace for e in events if e.resource != "secrets"} == {tenant.namespace}
        assert {(e.namespace, e.name) for e in events if e.resource == "secrets"} == {
            (home, "specserve-operator-identity")
        }
        assert [e for e in events if e.code == 403] == []
        site.api.delete("namespaces", None, other.namespace)

    def test_missing_permission_is_named_in_the_status_and_disturbs_no_other_service(
        self, site: Site, tenant: Tenant, watched: OperatorProcess
    ) -> None:
        rule = change_rule(site, tenant, "poddisruptionbudgets", ["get", "list", "watch"])
        watched.start()
        tenant.apply(service("with", decode={"replicas": 2}))
        tenant.apply(service("without", decode={"replicas": 1}))
        tenant.wait_ready("without")
        ready = tenant.wait_reason("ApplyFailed", name="with")
        assert 'cannot patch resource "poddisruptionbudgets" in API group "policy"' in ready["message"]
        tenant.wait(lambda: tenant.events("ApplyFailed", "with"), what="there is an event ApplyFailed")
        tenant.wait(lambda: len(tenant.ready_pods("decode")) == 3, what="the decode pods of both are ready")
        assert 'cannot patch resource "poddisruptionbudgets"' in watched.log()

        change_rule(site, tenant, "poddisruptionbudgets", rule["verbs"])
        tenant.wait_ready("with")
        assert list(tracebacks(watched.log())) == []

    def test_operator_that_may_write_no_events_does_all_else(
        self, site: Site, tenant: Tenant, watched: OperatorProcess
    ) -> None:
        rule = change_rule(site, tenant, "events", ["create"])
        watched.start()
        tenant.apply(service())
        tenant.wait_ready()
        tenant.change(engine={"image": "engine:b"}, decode={"replicas": 1})
        tenant.wait_ready()
        assert len(tenant.ready_pods("decode")) == 1
        assert tenant.events("ServiceReady") == []

        change_rule(site, tenant, "events", rule["verbs"])
        tenant.change(decode={"replicas": 2})
        tenant.wait_ready()
        tenant.wait(lambda: tenant.events("PoolScaled"), what="there are events again")
        assert list(tracebacks(watched.log())) == []

    def test_operator_that_may_not_read_is_not_ready_and_says_what_it_may_not(
        self, site: Site, tenant: Tenant, watched: OperatorProcess
    ) -> None:
        rule = change_rule(site, tenant, "networkpolicies", ["create", "patch"])
        watched.start(wait=False)
        missing = 'cannot list resource "networkpolicies" in API group "networking.k8s.io"'
        tenant.wait(lambda: missing in watched.log(), what="the log names what is missing")
        assert watched.probe("/readyz") == (503, "the cluster has not been listed yet\n")

        change_rule(site, tenant, "networkpolicies", rule["verbs"])
        watched.wait_ready()
        assert list(tracebacks(watched.log())) == []


def change_rule(site: Site, tenant: Tenant, resource: str, verbs: list[str]) -> Object:
    """Gives the namespaced operator other rights on a resource. Returns the rule that it had."""
    role = site.api.get("roles", tenant.namespace, "specserve-operator")
    assert role is not None
    former: Object = next(rule for rule in role["rules"] if resource in rule["resources"])
    rules = [rule | {"verbs": verbs} if rule is former else rule for rule in role["rules"]]
    site.api.patch("roles", tenant.namespace, "specserve-operator", {"rules": rules})
    return former
