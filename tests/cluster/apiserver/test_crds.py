"""CRDs are installed, upgraded and removed while the operator runs: ours, and those of the Prometheus Operator."""

import copy
import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import yaml

from hack.kube.control_plane import ControlPlane
from tests.cluster.api import RefusedError
from tests.cluster.operator_process import ROOT, OperatorProcess, tracebacks
from tests.cluster.site import Site, Tenant, service

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SERVICES = ROOT / "crds" / "specserve.dev_speculativeservices.yaml"
POD_MONITORS = "podmonitors.monitoring.coreos.com"


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A control plane of these tests alone, whose CRDs they change; with an operator."""
    folder = tmp_path_factory.mktemp("changing")
    with (
        ControlPlane(folder / "control-plane", controllers=True, manifests=[ROOT / "crds"]) as control_plane,
        Site(control_plane, folder) as opened,
    ):
        yield opened


@pytest.fixture
def tenant(changing: Site) -> Iterator[Tenant]:
    opened = changing.new_namespace(f"crds-{uuid4().hex[:6]}")
    yield opened
    changing.api.delete("namespaces", None, opened.namespace)


@pytest.fixture
def operator(changing: Site) -> Iterator[OperatorProcess]:
    """The operator, not running yet; what is started must still run in the end, and have had no bug."""
    if changing.operator.is_running:
        changing.operator.stop()
    yield changing.operator
    assert changing.operator.is_running
    assert list(tracebacks(changing.operator.log())) == []


def install(site: Site, *crds: dict[str, Any]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(crds)})
    site.control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


def current_crd() -> dict[str, Any]:
    crd: dict[str, Any] = yaml.safe_load(SERVICES.read_text())
    return crd


def outdated_crd() -> dict[str, Any]:
    """As an earlier version would have it: without a field of the status, and without one of its objects' fields."""
    crd = copy.deepcopy(current_crd())
    status = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    del status["endpoint"]
    del status["pools"]["items"]["properties"]["revision"]
    return crd


def pod_monitor_crd() -> dict[str, Any]:
    """Of that kind only the name matters here."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": POD_MONITORS, "annotations": {"api-approved.kubernetes.io": "unapproved"}},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


def monitors(tenant: Tenant) -> set[str]:
    """Names of the PodMonitors that there are. A kind that was just installed is refused for a moment."""
    try:
        return {obj["metadata"]["name"] for obj in tenant.api.find("podmonitors", tenant.namespace)}
    except RefusedError:
        return set()


def wait_monitors(tenant: Tenant, *names: str) -> None:
    # The mirror does not watch them: every look is a request.
    tenant.wait(lambda: monitors(tenant) == set(names), what=f"there are PodMonitors {names}")


def test_status_is_written_to_outdated_crds_and_says_that_they_are_until_they_are_upgraded(
    changing: Site, tenant: Tenant, operator: OperatorProcess
) -> None:
    install(changing, outdated_crd())
    operator.start()
    tenant.apply(service())
    tenant.wait_ready()
    available = tenant.wait_reason("CRDOutdated", type_="UpgradeAvailable")
    assert available["message"] == (
        "the installed CRDs are older than the operator and lack SpeculativeService.status.endpoint, "
        "SpeculativeService.status.pools[].revision"
    )
    assert "endpoint" not in tenant.status()
    assert "revision" not in tenant.pool("decode")
    assert tenant.pool("decode")["ready"] == 2

    install(changing, current_crd())
    tenant.wait_reason("UpToDate", type_="UpgradeAvailable")
    tenant.wait(lambda: "endpoint" in tenant.status(), what="the status has every field")
    assert tenant.pool("decode")["revision"]

    install(changing, outdated_crd())
    tenant.wait_reason("CRDOutdated", type_="UpgradeAvailable")
    install(changing, current_crd())
    tenant.wait_reason("UpToDate", type_="UpgradeAvailable")


def test_services_get_pod_monitors_when_their_kind_is_installed_and_go_on_when_it_is_removed(
    changing: Site, tenant: Tenant, operator: OperatorProcess
) -> None:
    install(changing, current_crd())
    operator.start()
    pid = operator.pid
    tenant.apply(service())
    tenant.wait_ready()
    for round_ in range(2):
        install(changing, pod_monitor_crd())
        changing.control_plane.kubectl("wait", "--for=condition=Established", "crd", POD_MONITORS)
        wait_monitors(tenant, "coder", *(f"new-{before}" for before in range(round_)))

        changing.control_plane.kubectl("delete", "crd", POD_MONITORS)
        tenant.apply(service(f"new-{round_}", prefill=None, decode={"replicas": 1}))
        tenant.wait_ready(f"new-{round_}")
        tenant.change(engine={"image": f"engine:{round_}"})
        tenant.wait_ready()
    assert operator.pid == pid


def test_operator_sees_pod_monitors_that_were_there_before_it(
    changing: Site, tenant: Tenant, operator: OperatorProcess
) -> None:
    install(changing, current_crd(), pod_monitor_crd())
    changing.control_plane.kubectl("wait", "--for=condition=Established", "crd", POD_MONITORS)
    operator.start()
    tenant.apply(service())
    wait_monitors(tenant, "coder")
    tenant.wait_ready()
    changing.control_plane.kubectl("delete", "crd", POD_MONITORS)
