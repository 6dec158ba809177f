"""Another operator, or another default, restarts no pod until somebody asks for it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.operator_process import OperatorOptions, OperatorProcess, install_rules
from tests.cluster.site import Site, Tenant, service

pytestmark = pytest.mark.cluster

ANNOTATION = "specserve.dev/upgrade"

StartWith = Callable[..., OperatorProcess]


@pytest.fixture
def start_with(site: Site, no_operator: None, tmp_path: Path) -> Iterator[StartWith]:
    """Starts an operator with other flags; the one that was started before is killed."""
    kubeconfig = install_rules(site.control_plane)
    running: list[OperatorProcess] = []
    with ExitStack() as stack:

        def start(**options: object) -> OperatorProcess:
            for former in running:
                former.kill()
            process = OperatorProcess(kubeconfig, tmp_path / "operator.log", OperatorOptions(**options))  # type: ignore[arg-type]
            stack.enter_context(process)
            process.start()
            running[:] = [process]
            return process

        yield start


def pods_of(tenant: Tenant) -> set[str]:
    return {pod["metadata"]["uid"] for pod in tenant.pods()}


def images(tenant: Tenant) -> dict[str, set[str]]:
    """The images that run, by pool."""
    return {
        pool: {pod["spec"]["containers"][0]["image"] for pod in tenant.pods(pool)}
        for pool in ("prefill", "decode", "gateway")
    }


def test_new_default_image_restarts_nothing_before_the_upgrade_is_asked_for(
    tenant: Tenant, start_with: StartWith
) -> None:
    start_with(engine_image="engine:1")
    tenant.apply(service())
    tenant.wait_ready()
    pods = pods_of(tenant)
    assert tenant.condition("UpgradeAvailable")["status"] == "False"

    start_with(engine_image="engine:2")
    available = tenant.wait_reason("NewerRevision", type_="UpgradeAvailable")
    assert available["status"] == "True"
    assert "prefill, decode would restart: image engine:1 -> engine:2" in available["message"]
    tenant.wait_ready()
    assert pods_of(tenant) == pods

    tenant.api.patch(
        "speculativeservices", tenant.namespace, "coder", {"metadata": {"annotations": {ANNOTATION: "one"}}}
    )
    tenant.wait_reason("UpToDate", type_="UpgradeAvailable")
    tenant.wait_ready()
    assert images(tenant) == {"prefill": {"engine:2"}, "decode": {"engine:2"}, "gateway": {"gateway:1"}}

    # The same value asks for nothing more.
    pods = pods_of(tenant)
    start_with(engine_image="engine:3")
    tenant.wait_reason("NewerRevision", type_="UpgradeAvailable")
    tenant.wait_ready()
    assert pods_of(tenant) == pods


def test_change_of_one_pool_under_a_newer_operator_restarts_that_pool_with_its_image(
    tenant: Tenant, start_with: StartWith
) -> None:
    start_with(engine_image="engine:1")
    tenant.apply(service())
    tenant.wait_ready()
    prefill = {pod["metadata"]["uid"] for pod in tenant.pods("prefill")}
    start_with(engine_image="engine:2")
    tenant.wait_reason("NewerRevision", type_="UpgradeAvailable")
    mark = tenant.mirror.mark()
    tenant.change(decode={"args": ["--max-num-seqs", "4"]})

    def is_replaced() -> bool:
        deleted = [c for c in tenant.history("pods", mark) if c.type == "DELETED" and "-decode-" in c.name]
        return len(deleted) == 2 and len(tenant.ready_pods("decode")) == 2

    tenant.wait(is_replaced, what="decode pods are replaced")
    tenant.wait_ready()
    assert images(tenant)["decode"] == {"engine:1"}
    assert {pod["metadata"]["uid"] for pod in tenant.pods("prefill")} == prefill


def test_lost_record_restarts_nothing_and_is_made_again(tenant: Tenant, start_with: StartWith) -> None:
    operator = start_with(engine_image="engine:1")
    tenant.apply(service())
    tenant.wait_ready()
    pods = pods_of(tenant)
    operator.kill()
    records = [name for plural, name in tenant.children() if plural == "controllerrevisions"]
    assert records
    for name in records:
        tenant.api.delete("controllerrevisions", tenant.namespace, name)
    start_with(engine_image="engine:2")
    tenant.wait(
        lambda: [name for plural, name in tenant.children() if plural == "controllerrevisions"],
        what="a record is made again",
    )
    tenant.wait_ready()
    assert pods_of(tenant) == pods


def test_drift_is_put_right_to_what_the_former_operator_rendered(tenant: Tenant, start_with: StartWith) -> None:
    start_with(engine_image="engine:1")
    tenant.apply(service())
    tenant.wait_ready()
    start_with(engine_image="engine:2")
    tenant.wait_reason("NewerRevision", type_="UpgradeAvailable")
    name = tenant.deployment("decode")["metadata"]["name"]
    tenant.api.delete("deployments", tenant.namespace, name)
    tenant.wait(lambda: tenant.mirror.get("deployments", tenant.namespace, name), what="the Deployment is there again")
    tenant.wait(lambda: len(tenant.ready_pods("decode")) == 2, what="its pods are ready")
    assert images(tenant)["decode"] == {"engine:1"}


def test_network_policies_go_when_they_are_switched_off(tenant: Tenant, start_with: StartWith) -> None:
    start_with()
    tenant.apply(service())
    tenant.wait_ready()
    pods = pods_of(tenant)
    assert len(tenant.mirror.find("networkpolicies", tenant.namespace)) == 3
    start_with(more=("--no-network-policies",))
    tenant.wait(lambda: not tenant.mirror.find("networkpolicies", tenant.namespace), what="no NetworkPolicy is left")
    tenant.wait_ready()
    assert pods_of(tenant) == pods
