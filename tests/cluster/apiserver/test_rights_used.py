"""Every right that the chart gives to the operator is one that it makes use of, and it needs no other."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from hack.kube.audit import AuditEvent
from hack.kube.control_plane import ControlPlane
from specserve_operator.core.records import HISTORY_LIMIT
from tests.cluster.apiserver.test_crds import POD_MONITORS, install, pod_monitor_crd
from tests.cluster.operator_process import NAMESPACE, ROOT, OperatorOptions, chart_rules, user_name
from tests.cluster.site import Site, Tenant, service

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Right = tuple[str, str, str]

EXTERNAL = {"scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 4}, "replicas": None}
MANAGED_BY = "app.kubernetes.io/managed-by"
CREATED, FORBIDDEN = 201, 403

# Granted and never seen in a request of the operator.
NOT_ASKED_FOR: dict[Right, str] = {
    ("", "pods", "get"): "gateways get it from the operator, which may only hand out what it has",
    ("specserve.dev", "speculativeservices/finalizers", "update"): (
        "an API server with OwnerReferencesPermissionEnforcement asks for it where a child is made"
    ),
}


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A control plane whose audit log has the requests of one operator, from its start on."""
    folder = tmp_path_factory.mktemp("audited")
    with (
        ControlPlane(folder / "control-plane", controllers=True, manifests=[ROOT / "crds"]) as control_plane,
        Site(control_plane, folder, options=OperatorOptions(leader_election=True)) as opened,
    ):
        install(opened, pod_monitor_crd())
        control_plane.kubectl("wait", "--for=condition=Established", "crd", POD_MONITORS)
        opened.operator.start()
        yield opened


def live_a_full_life(tenant: Tenant) -> None:
    """A service that gets everything there is, does without it again, and has a longer history than is kept."""
    tenant.apply(service())
    tenant.wait_ready()
    tenant.change(decode=EXTERNAL)
    tenant.wait(lambda: MANAGED_BY in scaler_labels(tenant), what="there is a PoolScaler")
    tenant.wait_ready()
    # One that the operator's watch does not show: it has to be looked for.
    tenant.api.patch("poolscalers", tenant.namespace, "coder-decode", {"metadata": {"labels": {MANAGED_BY: None}}})
    tenant.wait(lambda: MANAGED_BY in scaler_labels(tenant), what="the PoolScaler has its label again")
    tenant.change(engine={"image": "engine:b"})
    tenant.wait_ready()
    tenant.change(prefill=None, decode={"replicas": 1, "scaling": None})
    tenant.wait_ready()
    for number in range(HISTORY_LIMIT + 2):
        tenant.change(engine={"image": f"engine:{number}"})
        tenant.wait_ready()
    records = "controllerrevisions"
    tenant.wait(
        lambda: HISTORY_LIMIT <= len(tenant.mirror.find(records, tenant.namespace)) <= HISTORY_LIMIT + 1,
        what="old records are deleted",
    )
    tenant.delete()
    tenant.wait(lambda: not tenant.children() and not tenant.pods(), what="everything is gone")


def scaler_labels(tenant: Tenant) -> dict[str, str]:
    scaler = tenant.mirror.get("poolscalers", tenant.namespace, "coder-decode") or {"metadata": {}}
    return dict(scaler["metadata"].get("labels") or {})


def requested(events: Iterable[AuditEvent]) -> set[Right]:
    """Rights that requests had need of. To make an object by an apply takes two."""
    needed = set()
    for event in events:
        resource = "/".join(part for part in (event.resource, event.subresource) if part)
        needed.add((event.group, resource, event.verb))
        if event.code == CREATED:
            needed.add((event.group, resource, "create"))
    return needed


def granted(documents: Iterable[dict[str, Any]]) -> set[Right]:
    return {
        (group, resource, verb)
        for document in documents
        for rule in document.get("rules") or ()
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_rights_are_those_that_a_service_has_need_of(audited: Site) -> None:
    tenant = audited.new_namespace("full-life")
    live_a_full_life(tenant)
    audited.operator.stop()
    audited.writes.mark()  # everything before it is in the log
    events = [e for e in audited.control_plane.audit_events() if e.user == user_name() and e.resource]
    assert [e for e in events if e.code == FORBIDDEN] == []
    assert {e.name for e in events if e.resource == "secrets"} == {"specserve-operator-identity"}
    assert {e.namespace for e in events if e.resource in ("secrets", "leases")} == {NAMESPACE}

    may, needs = granted(chart_rules(leader_election=True)), requested(events)
    assert needs - may == set()
    assert may - needs == set(NOT_ASKED_FOR)
