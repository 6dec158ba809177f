"""What others change in the operator's objects: its own fields are put right, everything else stays."""

import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from tests.cluster.api import Object
from tests.cluster.mirror import ConditionNotMetError
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.site import Site, Tenant, content_of, difference, service
from tests.cluster.writes import summary

pytestmark = pytest.mark.cluster

Edit = Callable[[Tenant], tuple[str, str]]

_MEND_SECONDS = 20.0


@pytest.fixture(scope="module")
def running(site: Site) -> Iterator[Tenant]:
    """A namespace with a service that is ready, for all tests here: what one changes is put right when it ends."""
    tenant = site.new_namespace(f"drift-{uuid4().hex[:6]}")
    if not site.operator.is_running:
        site.operator.start()
    tenant.apply(service())
    tenant.wait_ready()
    yield tenant
    site.api.delete("namespaces", None, tenant.namespace)


@pytest.fixture(autouse=True)
def _undisturbed(operator: OperatorProcess, running: Tenant) -> None:
    """The operator runs and the service is ready; one that an earlier test has left broken is made anew."""
    try:
        running.wait_ready(timeout_seconds=_MEND_SECONDS)
    except ConditionNotMetError:
        running.delete()
        running.wait(lambda: not running.children() and not running.pods(), what="the broken service is gone")
        running.apply(service())
        running.wait_ready()


def edit_deployment(pool: str, patch: Object) -> Edit:
    def edit(tenant: Tenant) -> tuple[str, str]:
        name = tenant.deployment(pool)["metadata"]["name"]
        tenant.api.patch("deployments", tenant.namespace, name, patch)
        return "deployments", name

    return edit


def set_in_container(path: str, value: object) -> Edit:
    def edit(tenant: Tenant) -> tuple[str, str]:
        name = tenant.deployment("decode")["metadata"]["name"]
        operation = {"op": "replace", "path": f"/spec/template/spec/containers/0/{path}", "value": value}
        tenant.api.json_patch("deployments", tenant.namespace, name, operation)
        return "deployments", name

    return edit


def set_volume(tenant: Tenant) -> tuple[str, str]:
    """Another source for the volume of the run-time settings."""
    deployment = tenant.deployment("decode")
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    index = next(i for i, volume in enumerate(volumes) if "configMap" in volume)
    operation = {
        "op": "replace",
        "path": f"/spec/template/spec/volumes/{index}",
        "value": {"name": volumes[index]["name"], "emptyDir": {}},
    }
    name = deployment["metadata"]["name"]
    tenant.api.json_patch("deployments", tenant.namespace, name, operation)
    return "deployments", name


def set_trust(tenant: Tenant) -> tuple[str, str]:
    """Another certificate authority."""
    trust = tenant.mirror.get("configmaps", tenant.namespace, "coder-trust")
    assert trust is not None
    tenant.api.patch("configmaps", tenant.namespace, "coder-trust", {"data": dict.fromkeys(trust["data"], "another")})
    return "configmaps", "coder-trust"


def edit_named(plural: str, name: str, patch: Object) -> Edit:
    def edit(tenant: Tenant) -> tuple[str, str]:
        tenant.api.patch(plural, tenant.namespace, name, patch)
        return plural, name

    return edit


RBAC = "rbac.authorization.k8s.io"
FOREIGN_RULE = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
EDITS: dict[str, Edit] = {
    "replicas of a Deployment": edit_deployment("decode", {"spec": {"replicas": 7}}),
    "label of a Deployment": edit_deployment("decode", {"metadata": {"labels": {"specserve.dev/pool": "other"}}}),
    "label by which objects are found": edit_deployment(
        "decode", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}
    ),
    "annotation of a Deployment": edit_deployment(
        "decode", {"metadata": {"annotations": {"specserve.dev/spec-hash": "0"}}}
    ),
    "owner of a Deployment": edit_deployment("gateway", {"metadata": {"ownerReferences": None}}),
    "image": set_in_container("image", "other:2"),
    "environment": set_in_container("env/0/valueFrom/fieldRef/fieldPath", "spec.nodeName"),
    "environment with another source": set_in_container("env/0", {"name": "POD_NAME", "value": "other"}),
    "arguments": set_in_container("args", ["--nothing"]),
    "probe": set_in_container("readinessProbe/periodSeconds", 77),
    "probe of another kind": set_in_container("readinessProbe", {"exec": {"command": ["true"]}}),
    "volume of another kind": set_volume,
    "port of a Service": edit_named("services", "coder-gateway", {"spec": {"ports": [{"name": "http", "port": 99}]}}),
    "selector of a Service": edit_named(
        "services", "coder-gateway", {"spec": {"selector": {"specserve.dev/pool": "x"}}}
    ),
    "data of a ConfigMap": edit_named("configmaps", "coder-runtime", {"data": {"state.json": "{}"}}),
    "trust bundle": set_trust,
    "rule of a Role": edit_named("roles", "coder-gateway", {"rules": [FOREIGN_RULE]}),
    "subject of a RoleBinding": edit_named(
        "rolebindings", "coder-gateway", {"subjects": [{"kind": "User", "name": "eve", "apiGroup": RBAC}]}
    ),
    "bounds of a PodDisruptionBudget": edit_named(
        "poddisruptionbudgets", "coder-decode", {"spec": {"maxUnavailable": 2}}
    ),
    "bounds of another kind": edit_named(
        "poddisruptionbudgets", "coder-decode", {"spec": {"maxUnavailable": None, "minAvailable": 1}}
    ),
    "rule of a NetworkPolicy": edit_named("networkpolicies", "coder-prefill", {"spec": {"ingress": [{}]}}),
    "label of a ServiceAccount": edit_named(
        "serviceaccounts", "coder-gateway", {"metadata": {"labels": {"specserve.dev/service": "x"}}}
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_changed_field_is_put_right(running: Tenant, what: str, record_seconds: Callable[[float], None]) -> None:
    before = {where: content_of(child) for where, child in running.children().items()}
    plural, name = EDITS[what](running)

    def differences() -> list[str]:
        return list(difference(before[plural, name], content_of(running.mirror.get(plural, running.namespace, name))))

    began = time.monotonic()
    running.mirror.wait_until(
        lambda: not differences(), what=f"{plural} {name} is as before", show=lambda: "\n".join(differences())
    )
    record_seconds(time.monotonic() - began)
    running.wait_ready()


@pytest.mark.parametrize(
    "plural",
    [
        *("configmaps", "deployments", "networkpolicies", "poddisruptionbudgets", "rolebindings", "roles"),
        *("serviceaccounts", "services"),
    ],
)
def test_deleted_objects_are_made_again(running: Tenant, plural: str, record_seconds: Callable[[float], None]) -> None:
    before = {name: content_of(child) for (kind, name), child in running.children().items() if kind == plural}
    assert before
    for name in before:
        running.api.delete(plural, running.namespace, name)
    began = time.monotonic()

    def are_back() -> bool:
        now = {name: content_of(child) for (kind, name), child in running.children().items() if kind == plural}
        return now == before

    running.wait(are_back, what=f"all {plural} are there again")
    record_seconds(time.monotonic() - began)
    running.wait_ready()


def test_what_others_add_stays(site: Site, running: Tenant) -> None:
    name = running.deployment("decode")["metadata"]["name"]
    running.api.patch(
        "deployments",
        running.namespace,
        name,
        {
            "metadata": {"labels": {"team": "search"}, "annotations": {"example.com/owner": "ann"}},
            "spec": {"minReadySeconds": 1, "template": {"metadata": {"annotations": {"example.com/restarted": "1"}}}},
        },
    )
    running.api.patch("services", running.namespace, "coder-gateway", {"metadata": {"labels": {"team": "search"}}})
    running.api.patch("configmaps", running.namespace, "coder-runtime", {"data": {"more": "text"}})
    running.change(rollout={"progressDeadlineSeconds": 1700})
    running.wait(
        lambda: running.deployment("decode")["spec"]["progressDeadlineSeconds"] == 1700, what="the change is applied"
    )
    running.wait_ready()
    deployment = running.deployment("decode")
    assert deployment["metadata"]["labels"]["team"] == "search"
    assert deployment["metadata"]["annotations"]["example.com/owner"] == "ann"
    assert deployment["spec"]["minReadySeconds"] == 1
    assert deployment["spec"]["template"]["metadata"]["annotations"]["example.com/restarted"] == "1"
    gateway = running.mirror.get("services", running.namespace, "coder-gateway")
    config = running.mirror.get("configmaps", running.namespace, "coder-runtime")
    assert gateway is not None
    assert config is not None
    assert gateway["metadata"]["labels"]["team"] == "search"
    assert config["data"]["more"] == "text"


def test_foreign_sidecar_stays_and_starts_no_quarrel(site: Site, running: Tenant) -> None:
    name = running.deployment("decode")["metadata"]["name"]
    sidecar = {"name": "proxy", "image": "proxy:1"}
    running.api.json_patch(
        "deployments",
        running.namespace,
        name,
        {"op": "add", "path": "/spec/template/spec/containers/-", "value": sidecar},
    )

    def has_sidecars() -> bool:
        pods = running.ready_pods("decode")
        return len(pods) == 2 and all(len(pod["spec"]["containers"]) == 2 for pod in pods)

    running.wait(has_sidecars, what="all decode pods have the sidecar")
    running.wait_ready()
    running.wait_quiet()
    # A wake-up for every object: each is looked at again, and none may be written for it.
    mark = site.writes.mark()
    for plural, child in (("deployments", name), ("services", "coder-gateway")):
        running.api.patch(plural, running.namespace, child, {"metadata": {"annotations": {"example.com/woken": "1"}}})
    running.wait_quiet()
    writes = site.writes.since(mark, namespace=running.namespace)
    assert summary(w for w in writes if w.resource == "deployments") == ""
    names = [c["name"] for c in running.deployment("decode")["spec"]["template"]["spec"]["containers"]]
    assert names == ["engine", "proxy"]
