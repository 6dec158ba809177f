"""Services go when they are told to, with everything that is theirs, whether or not an operator runs."""

import pytest

from tests.cluster.operator_process import OperatorProcess, tracebacks
from tests.cluster.site import LONG_SECONDS, Site, Tenant, service
from tests.cluster.writes import summary

pytestmark = pytest.mark.cluster

# What goes with its namespace goes in no order, and may be missed for a moment; but nobody is to fight for it.
MOST_WRITES = 200


def wait_gone(tenant: Tenant, name: str = "coder") -> None:
    """Returns when the service and all its objects and pods are gone."""

    def is_gone() -> bool:
        return tenant.service(name) is None and not tenant.children(name) and not tenant.pods()

    tenant.wait(is_gone, what=f"service {name} is gone with all that it had")


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_deleted_service_goes_with_its_objects_and_nothing_is_made_anew(
    site: Site, operator: OperatorProcess, tenant: Tenant, propagation: str
) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    mark = site.writes.mark()
    tenant.delete(propagation=propagation)
    wait_gone(tenant)
    created = [w for w in site.writes.since(mark, namespace=tenant.namespace) if w.code == 201]
    assert summary(w for w in created if w.resource != "events") == ""


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_service_can_be_deleted_while_no_operator_runs(
    site: Site, operator: OperatorProcess, tenant: Tenant, propagation: str
) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    operator.kill()
    tenant.delete(propagation=propagation)
    wait_gone(tenant)


def test_nothing_is_left_terminating_when_the_operator_was_removed_first(
    site: Site, operator: OperatorProcess, tenant: Tenant
) -> None:
    for name in ("one", "two"):
        tenant.apply(service(name))
        tenant.wait_ready(name)
    for name in ("one", "two"):
        obj = tenant.service(name)
        assert obj is not None
        assert "finalizers" not in obj["metadata"]
    assert operator.stop() == 0
    tenant.delete("one")
    tenant.delete("two")
    wait_gone(tenant, "one")
    wait_gone(tenant, "two")


def test_no_object_of_a_service_holds_up_a_deletion(operator: OperatorProcess, tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    finalizers = {where: child["metadata"].get("finalizers") for where, child in tenant.children().items()}
    assert {where: found for where, found in finalizers.items() if found} == {}


def test_namespace_can_be_deleted_while_the_operator_works(
    site: Site, operator: OperatorProcess, tenant: Tenant
) -> None:
    other = site.new_namespace(f"goes-{tenant.namespace[-6:]}")
    other.apply(service())
    other.apply(service("busy", decode={"replicas": 3}))
    other.wait_ready()
    mark = site.writes.mark()
    site.api.delete("namespaces", None, other.namespace)
    site.mirror.wait_until(
        lambda: site.api.get("namespaces", None, other.namespace) is None,
        what="the namespace is gone",
        timeout_seconds=LONG_SECONDS,
        show=other.describe,
    )
    assert len(site.writes.since(mark, namespace=other.namespace)) < MOST_WRITES
    assert operator.is_running
    assert list(tracebacks(operator.log())) == []


def test_service_made_anew_under_its_name_gets_objects_of_its_own(operator: OperatorProcess, tenant: Tenant) -> None:
    tenant.apply(service())
    old = tenant.wait_ready()
    names = set(tenant.children())
    tenant.delete()
    tenant.apply(service())

    def owners() -> set[str]:
        children = [*tenant.children().values(), *tenant.mirror.find("deployments", tenant.namespace)]
        return {reference["uid"] for child in children for reference in child["metadata"]["ownerReferences"]}

    new = tenant.wait_ready()
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    tenant.wait(lambda: owners() == {new["metadata"]["uid"]}, what="all objects belong to the new service")
    tenant.wait_ready()
    assert set(tenant.children()) == names


def test_service_that_is_deleted_before_it_is_ready_leaves_nothing(
    site: Site, operator: OperatorProcess, tenant: Tenant
) -> None:
    for _ in range(5):
        tenant.apply(service())
        tenant.delete()
    wait_gone(tenant)
    assert list(tracebacks(operator.log())) == []
