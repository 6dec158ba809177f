"""What the operator and its users may do: exactly what is listed here."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from specserve_operator.cluster.kube.kinds import WATCHED
from tests.chart.cases import CASES
from tests.chart.rendering import Manifest, Release, of_kind, only, operator_container, render

Right = tuple[str, str, str]  # API group, resource, verb

READ = ("get", "list", "watch")
MAKE = (*READ, "create", "patch")
WRITE = (*MAKE, "delete")


def _rights(group: str, resources: str, verbs: Iterable[str]) -> set[Right]:
    return {(group, resource, verb) for resource in resources.split() for verb in verbs}


OPERATOR_RIGHTS = (
    _rights("specserve.dev", "speculativeservices", ("list", "watch"))
    | _rights("specserve.dev", "poolscalers", WRITE)
    | _rights("specserve.dev", "speculativeservices/status poolscalers/status", ("patch",))
    | _rights("specserve.dev", "speculativeservices/finalizers", ("update",))
    | _rights("apps", "deployments controllerrevisions", WRITE)
    | _rights("", "services", WRITE)
    | _rights("", "configmaps serviceaccounts", MAKE)
    | _rights("", "pods", READ)
    | _rights("", "events", ("create", "patch"))
    | _rights("rbac.authorization.k8s.io", "roles rolebindings", MAKE)
    | _rights("policy", "poddisruptionbudgets", WRITE)
    | _rights("networking.k8s.io", "networkpolicies", WRITE)
    | _rights("monitoring.coreos.com", "podmonitors", ("get", "list", "create", "patch"))
)
OWN_RIGHTS = _rights("", "secrets", ("get", "patch"))
LEASE_RIGHTS = _rights("coordination.k8s.io", "leases", ("get", "create", "update"))
SERVICES, SCALERS, DRAFTS = "speculativeservices", "poolscalers", "draftrevisions"
ALL_KINDS = f"{SERVICES} {SCALERS} {DRAFTS}"
STATUSES = f"{SERVICES}/status {SCALERS}/status {DRAFTS}/status"
USER_RIGHTS = {
    "viewer": _rights("specserve.dev", ALL_KINDS, READ)
    | _rights("specserve.dev", f"{STATUSES} {SCALERS}/scale", ("get",)),
    "editor": _rights("specserve.dev", SERVICES, (*WRITE, "update", "deletecollection"))
    | _rights("specserve.dev", SCALERS, (*READ, "update", "patch"))
    | _rights("specserve.dev", f"{SCALERS}/scale", ("get", "update", "patch"))
    | _rights("specserve.dev", DRAFTS, READ)
    | _rights("specserve.dev", STATUSES, ("get",)),
    "admin": _rights("specserve.dev", ALL_KINDS, (*WRITE, "update", "deletecollection"))
    | _rights("specserve.dev", f"{SCALERS}/scale", ("get", "update", "patch"))
    | _rights("specserve.dev", STATUSES, ("get",)),
}


def _granted(role: Manifest) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _named(objects: Sequence[Manifest], kind: str) -> dict[tuple[str, str], Manifest]:
    """Objects of a kind by namespace and name."""
    return {(o["metadata"].get("namespace", ""), o["metadata"]["name"]): o for o in of_kind(objects, kind)}


@pytest.mark.parametrize("name", CASES)
def test_no_rule_has_a_wildcard(name: str) -> None:
    roles = [obj for obj in render(CASES[name]) if obj["kind"] in ("Role", "ClusterRole")]
    assert roles
    for role in roles:
        for rule in role["rules"]:
            assert set(rule) <= {"apiGroups", "resources", "resourceNames", "verbs"}
            assert "*" not in str(rule)


def test_the_operator_of_a_cluster_has_the_listed_rights() -> None:
    objects = render(Release())
    role = _named(objects, "ClusterRole")["", "specserve-operator"]
    assert _granted(role) == OPERATOR_RIGHTS
    binding = only(objects, "ClusterRoleBinding")
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "specserve-operator",
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "specserve-operator", "namespace": "llm-system"}]


def test_rights_cover_every_kind_that_the_operator_watches() -> None:
    for kind in WATCHED:
        verbs = ("list",) if kind.is_optional else ("list", "watch")
        assert {(kind.group, kind.plural, verb) for verb in verbs} <= OPERATOR_RIGHTS


def test_rights_that_the_operator_hands_out_to_gateways_are_its_own() -> None:
    # render/access.py; without these the API server would refuse the gateway's Role as an escalation.
    assert _rights("", "pods", READ) <= OPERATOR_RIGHTS


def test_one_secret_is_granted_in_the_operators_namespace_only() -> None:
    role = only(render(Release()), "Role")
    assert role["metadata"]["namespace"] == "llm-system"
    assert _granted(role) == OWN_RIGHTS
    (secrets,) = role["rules"]
    assert secrets["resourceNames"] == ["specserve-operator-identity"]


def test_one_lease_is_granted_where_there_is_an_election() -> None:
    objects = render(Release({"leaderElection": {"enabled": True}}))
    role = only(objects, "Role")
    assert _granted(role) == OWN_RIGHTS | LEASE_RIGHTS
    names = {tuple(r["verbs"]): r.get("resourceNames") for r in role["rules"] if "leases" in r["resources"]}
    # Who makes an object has not named it yet when it is asked for the right.
    assert names == {("get", "update"): ["specserve-operator"], ("create",): None}
    assert "--leader-election-lease=specserve-operator" in operator_container(objects)["args"]


def test_rights_follow_the_name_of_the_secret() -> None:
    objects = render(Release({"identity": {"secret": {"create": False, "name": "ours"}}}))
    (secrets,) = [rule for rule in only(objects, "Role")["rules"] if "secrets" in rule["resources"]]
    assert secrets["resourceNames"] == ["ours"]
    assert not of_kind(objects, "Secret")


def test_an_operator_of_some_namespaces_has_no_rights_in_the_cluster() -> None:
    objects = render(CASES["namespaced"])
    assert not of_kind(objects, "ClusterRole")
    assert not of_kind(objects, "ClusterRoleBinding")
    roles, bindings = _named(objects, "Role"), _named(objects, "RoleBinding")
    assert set(roles) == set(bindings)
    assert {place: _granted(role) for place, role in roles.items()} == {
        ("team-a", "llm-specserve-operator"): OPERATOR_RIGHTS,
        ("team-b", "llm-specserve-operator"): OPERATOR_RIGHTS,
        ("team-a", "llm-specserve-operator-own"): OWN_RIGHTS,
    }
    for (_, name), binding in bindings.items():
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", name)
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("llm-specserve-operator", "team-a")


@pytest.mark.parametrize(("role", "builtin"), [("viewer", "view"), ("editor", "edit"), ("admin", "admin")])
def test_kubernetes_own_roles_get_the_listed_rights(role: str, builtin: str) -> None:
    found = _named(render(Release()), "ClusterRole")["", f"specserve-{role}"]
    assert _granted(found) == USER_RIGHTS[role]
    aggregations = {k: v for k, v in found["metadata"]["labels"].items() if "aggregate" in k}
    assert aggregations == {f"rbac.authorization.k8s.io/aggregate-to-{builtin}": "true"}


def test_each_role_of_users_has_all_rights_of_the_one_below() -> None:
    assert USER_RIGHTS["viewer"] <= USER_RIGHTS["editor"] <= USER_RIGHTS["admin"]


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ({"rbac": {"aggregate": False}}, {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}),
        ({"rbac": {"create": False}}, set()),
    ],
)
def test_rights_can_be_left_to_others(values: dict[str, Any], left: set[str]) -> None:
    objects = render(Release(values))
    assert {o["kind"] for o in objects if o["apiVersion"].startswith("rbac.")} == left
    assert not [o for o in of_kind(objects, "ClusterRole") if o["metadata"]["name"] != "specserve-operator"]


def test_a_given_service_account_is_used_and_not_made() -> None:
    objects = render(Release({"serviceAccount": {"create": False, "name": "ours"}}))
    assert not of_kind(objects, "ServiceAccount")
    assert only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "ours"
    assert {s["name"] for b in of_kind(objects, "RoleBinding") for s in b["subjects"]} == {"ours"}
