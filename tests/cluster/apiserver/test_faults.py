"""The API server, its store or the network go away for a while: the operator goes on when they are back.

These tests have a control plane of their own, which they break and mend one after the other.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hack.kube.control_plane import ControlPlane
from hack.kube.errors import log_tail
from tests.cluster.apiserver.rollouts import change_image, counts, start, wait_served_by
from tests.cluster.fake_kubelet import Behaviour
from tests.cluster.operator_process import NAMESPACE, ROOT, OperatorProcess, tracebacks
from tests.cluster.site import Site, Tenant, service

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

_PAUSE_SECONDS = 20.0
_RECOVERY_SECONDS = 150.0
# Less than the time between two lists of everything, of which one would notice it anyway.
_NOTICE_SECONDS = 90.0


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A control plane that only these tests use, with an operator behind a proxy."""
    folder = tmp_path_factory.mktemp("breakable")
    with (
        ControlPlane(folder / "control-plane", controllers=True, manifests=[ROOT / "crds"]) as control_plane,
        Site(control_plane, folder, behind_proxy=True) as opened,
    ):
        yield opened


@pytest.fixture
def operator(breakable: Site) -> OperatorProcess:
    """The operator of these tests, running."""
    if not breakable.operator.is_running:
        breakable.operator.start()
    return breakable.operator


@pytest.fixture
def tenant(breakable: Site, operator: OperatorProcess) -> Iterator[Tenant]:
    """A namespace with a service that is ready; afterwards the same operator must still run, and have had no bug."""
    pid = operator.pid
    opened = breakable.new_namespace(f"fault-{uuid4().hex[:6]}")
    start(opened)
    yield opened
    breakable.api.delete("namespaces", None, opened.namespace)
    assert operator.is_running, log_tail(operator.log_file, 40)
    assert operator.pid == pid
    assert list(tracebacks(operator.log())) == []


def wait_answers(site: Site) -> None:
    site.mirror.wait_until(site.control_plane.is_ready, what="the API server answers", timeout_seconds=60)


def wait_follows(tenant: Tenant, image: str) -> None:
    """Changes the service, and returns when the operator has done what that asks for."""
    change_image(tenant, image)
    wait_served_by(tenant, image, timeout_seconds=_RECOVERY_SECONDS)
    assert counts(tenant) == {"prefill": 1, "decode": 2, "gateway": 1}


def delete_objects(tenant: Tenant) -> dict[str, str]:
    """Deletes an object of several kinds. Returns their uids by name."""
    deleted = {}
    for plural, name in (
        ("services", "coder-gateway"),
        ("configmaps", "coder-runtime"),
        ("roles", "coder-gateway"),
        ("poddisruptionbudgets", "coder-decode"),
        ("deployments", tenant.deployment("gateway")["metadata"]["name"]),
    ):
        obj = tenant.mirror.get(plural, tenant.namespace, name)
        assert obj is not None
        deleted[f"{plural}/{name}"] = obj["metadata"]["uid"]
        tenant.api.delete(plural, tenant.namespace, name)
    return deleted


def wait_made_again(tenant: Tenant, deleted: dict[str, str]) -> None:
    def are_there() -> bool:
        found = [tenant.mirror.get(plural, tenant.namespace, name) for plural, name in (n.split("/") for n in deleted)]
        return all(obj and obj["metadata"]["uid"] not in deleted.values() for obj in found)

    tenant.wait(are_there, what=f"{', '.join(deleted)} are made again", timeout_seconds=_RECOVERY_SECONDS)
    tenant.wait_ready(timeout_seconds=_RECOVERY_SECONDS)


def test_operator_goes_on_after_the_api_server_was_away(breakable: Site, tenant: Tenant) -> None:
    change_image(tenant, "engine:before")
    breakable.control_plane.stop_apiserver()
    breakable.control_plane.start_apiserver()
    wait_served_by(tenant, "engine:before", timeout_seconds=_RECOVERY_SECONDS)
    wait_follows(tenant, "engine:after")


def test_operator_goes_on_after_the_store_hung(breakable: Site, tenant: Tenant) -> None:
    breakable.control_plane.pause_etcd()
    # Nothing tells of time that passes: only the wait does.
    with pytest.raises(AssertionError, match="never"):
        breakable.mirror.wait_until(lambda: False, what="never", timeout_seconds=_PAUSE_SECONDS)
    breakable.control_plane.resume_etcd()
    wait_answers(breakable)
    wait_follows(tenant, "engine:after-pause")


def test_deletions_that_no_watch_told_of_are_noticed(breakable: Site, tenant: Tenant) -> None:
    """The API server forgets its past with a restart, so that watches cannot go on where they were."""
    breakable.proxy.cut()
    deleted = delete_objects(tenant)
    breakable.control_plane.restart_apiserver()
    wait_answers(breakable)
    breakable.proxy.mend()
    wait_made_again(tenant, deleted)


def test_cluster_that_was_emptied_behind_broken_watches_is_seen_to_be_empty(
    breakable: Site, tenant: Tenant, operator: OperatorProcess
) -> None:
    """Watches that begin anew show nothing then, and a list tells that only where somebody looks."""
    names = {tenant.namespace, "default", "kube-system", "kube-public", "kube-node-lease", NAMESPACE}
    tenant.wait(
        lambda: {obj["metadata"]["name"] for obj in breakable.api.find("namespaces")} <= names,
        what="the namespaces of earlier tests are gone",
        timeout_seconds=_RECOVERY_SECONDS,
    )
    # An API server that is killed while a namespace goes may forget custom resources in it.
    for left in breakable.api.find("speculativeservices"):
        if left["metadata"]["namespace"] != tenant.namespace:
            breakable.api.delete("speculativeservices", left["metadata"]["namespace"], left["metadata"]["name"])
    assert operator.metrics()["specserve_operator_cached_objects"] > 0
    breakable.proxy.cut()
    tenant.delete()
    tenant.wait(lambda: not tenant.children() and not tenant.pods(), what="everything is gone")
    breakable.control_plane.restart_apiserver()
    wait_answers(breakable)
    breakable.proxy.mend()
    tenant.wait(
        lambda: operator.metrics()["specserve_operator_cached_objects"] == 0,
        what="the operator remembers nothing",
        timeout_seconds=_NOTICE_SECONDS,
    )


def test_changes_behind_a_silent_network_are_noticed_when_it_speaks_again(breakable: Site, tenant: Tenant) -> None:
    breakable.proxy.freeze()
    deleted = delete_objects(tenant)
    breakable.proxy.thaw()
    wait_made_again(tenant, deleted)


if os.environ.get("SPECSERVE_SOAK"):  # it takes more than a minute until a silent watch is given up

    def test_watches_that_have_fallen_silent_are_begun_anew(breakable: Site, tenant: Tenant) -> None:
        breakable.proxy.strand()
        wait_made_again(tenant, delete_objects(tenant))


def test_operator_goes_on_when_all_its_connections_break(breakable: Site, tenant: Tenant) -> None:
    change_image(tenant, "engine:cut")
    for _ in range(3):
        breakable.proxy.cut()
        breakable.proxy.mend()
    wait_served_by(tenant, "engine:cut", timeout_seconds=_RECOVERY_SECONDS)
    wait_made_again(tenant, delete_objects(tenant))


def test_operator_that_stood_still_catches_up(breakable: Site, tenant: Tenant, operator: OperatorProcess) -> None:
    tenant.behave(Behaviour(start_seconds=0.1))
    operator.freeze()
    deleted = delete_objects(tenant)
    tenant.apply(service("second"))
    tenant.change(engine={"image": "engine:meanwhile"})
    operator.thaw()
    wait_made_again(tenant, deleted)
    tenant.wait_ready("second", timeout_seconds=_RECOVERY_SECONDS)
    wait_served_by(tenant, "engine:meanwhile", timeout_seconds=_RECOVERY_SECONDS)


def test_operator_that_finds_no_api_server_ends_and_says_so(breakable: Site, tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    kubeconfig = breakable.control_plane.kubeconfig
    breakable.control_plane.stop_apiserver()
    try:
        with OperatorProcess(kubeconfig, log) as other:
            other.start(wait=False)
            assert other.wait_ended() == 1
    finally:
        breakable.control_plane.start_apiserver()
    assert "the API server does not answer" in log.read_text()
    assert list(tracebacks(log.read_text())) == []


def test_operator_without_its_crds_ends_and_says_what_to_install(breakable: Site, tmp_path: Path) -> None:
    log, crd = tmp_path / "operator.log", "poolscalers.specserve.dev"
    if breakable.operator.is_running:
        breakable.operator.stop()
    breakable.api.delete("customresourcedefinitions", None, crd)
    breakable.mirror.wait_until(
        lambda: breakable.api.get("customresourcedefinitions", None, crd) is None, what=f"{crd} is gone"
    )
    try:
        with OperatorProcess(breakable.control_plane.kubeconfig, log) as other:
            other.start(wait=False)
            assert other.wait_ended() == 1
    finally:
        breakable.control_plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    assert "the API server has no poolscalers of specserve.dev/v1alpha1: install the CRDs" in log.read_text()
    assert list(tracebacks(log.read_text())) == []
