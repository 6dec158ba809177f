"""Pools whose size others choose: an autoscaler and the operator never write the same field."""

import pytest

from tests.cluster.api import Object, path_of
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.site import Tenant, service

pytestmark = pytest.mark.cluster

EXTERNAL = {"scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 4}}


def scaler(tenant: Tenant, pool: str = "decode") -> Object | None:
    return tenant.mirror.get("poolscalers", tenant.namespace, f"coder-{pool}")


def scale(tenant: Tenant, replicas: int, pool: str = "decode") -> None:
    """What an autoscaler does."""
    tenant.api.patch(
        "poolscalers", tenant.namespace, f"coder-{pool}", {"spec": {"replicas": replicas}}, subresource="scale"
    )


def wait_size(tenant: Tenant, replicas: int, pool: str = "decode") -> None:
    tenant.wait(lambda: tenant.pool(pool).get("desired") == replicas, what=f"{pool} is to have {replicas} pods")
    tenant.wait(lambda: len(tenant.ready_pods(pool)) == replicas, what=f"{replicas} pods of {pool} are ready")
    tenant.wait_ready()


def wait_status(tenant: Tenant, **fields: object) -> None:
    def has_them() -> bool:
        status = (scaler(tenant) or {}).get("status") or {}
        return all(status.get(name) == value for name, value in fields.items())

    tenant.wait(has_them, what=f"the PoolScaler's status has {fields}")


@pytest.fixture(autouse=True)
def _scaled(operator: OperatorProcess, tenant: Tenant) -> None:
    tenant.apply(service(decode=EXTERNAL))
    tenant.wait_ready()


def test_pool_has_the_size_that_others_ask_for(tenant: Tenant) -> None:
    scale(tenant, 3)
    wait_size(tenant, 3)
    wait_status(tenant, replicas=3, desiredReplicas=3, reason="ExternallyScaled")
    scale(tenant, 2)
    wait_size(tenant, 2)
    tenant.wait(lambda: len(tenant.events("PoolScaled")) >= 2, what="there are events PoolScaled")


def test_size_stays_within_the_bounds_of_the_spec(tenant: Tenant) -> None:
    scale(tenant, 9)
    wait_size(tenant, 4)
    wait_status(tenant, desiredReplicas=4, reason="MaxReplicasReached")
    found = scaler(tenant)
    assert found is not None
    assert found["spec"]["replicas"] == 9


def test_applying_the_service_again_does_not_reset_the_size(tenant: Tenant) -> None:
    scale(tenant, 3)
    wait_size(tenant, 3)
    tenant.apply(service(decode=EXTERNAL))
    tenant.apply(service(decode=EXTERNAL, gateway={"port": 81}))
    tenant.wait(lambda: tenant.status()["endpoint"].endswith(":81"), what="the change is applied")
    wait_size(tenant, 3)


def test_replicas_of_a_deployment_that_somebody_edits_go_back_to_what_the_scaler_says(tenant: Tenant) -> None:
    scale(tenant, 3)
    wait_size(tenant, 3)
    name = tenant.deployment("decode")["metadata"]["name"]
    tenant.api.patch("deployments", tenant.namespace, name, {"spec": {"replicas": 1}})
    tenant.wait(lambda: tenant.deployment("decode")["spec"]["replicas"] == 3, what="the replicas are put right")
    wait_size(tenant, 3)


def test_autoscalers_find_the_pods_of_the_pool_through_the_scale(tenant: Tenant) -> None:
    wait_status(tenant, replicas=1)
    found = tenant.api.request("GET", path_of("poolscalers", tenant.namespace, "coder-decode", "scale"))
    assert (found["spec"]["replicas"], found["status"]["replicas"]) == (1, 1)
    pods = tenant.api.find("pods", tenant.namespace, selector=found["status"]["selector"])
    assert [pod["metadata"]["name"] for pod in pods] == [p["metadata"]["name"] for p in tenant.pods("decode")]
    printed = tenant.site.control_plane.kubectl(
        "scale", "poolscaler", "coder-decode", "--replicas=2", "-n", tenant.namespace
    )
    assert "scaled" in printed
    wait_size(tenant, 2)


def test_scaler_is_made_with_the_size_that_the_pool_has(tenant: Tenant) -> None:
    scale(tenant, 3)
    wait_size(tenant, 3)
    tenant.api.delete("poolscalers", tenant.namespace, "coder-decode")
    tenant.wait(lambda: scaler(tenant), what="the PoolScaler is made again")
    wait_size(tenant, 3)
    found = scaler(tenant)
    assert found is not None
    assert found["spec"]["replicas"] == 3


def test_scaler_goes_when_the_size_is_fixed_and_comes_with_that_size(tenant: Tenant) -> None:
    tenant.change(decode={"replicas": 2, "scaling": None})
    tenant.wait(lambda: scaler(tenant) is None, what="the PoolScaler is gone")
    wait_size(tenant, 2)
    tenant.change(decode={"replicas": None, **EXTERNAL})
    tenant.wait(lambda: scaler(tenant), what="the PoolScaler is there again")
    wait_size(tenant, 2)
    found = scaler(tenant)
    assert found is not None
    assert found["spec"]["replicas"] == 2


def test_operator_never_writes_the_size_that_others_have_set(operator: OperatorProcess, tenant: Tenant) -> None:
    scale(tenant, 3)
    wait_size(tenant, 3)
    operator.restart()
    tenant.change(engine={"image": "engine:b"})
    wait_size(tenant, 3)
    sizes = [c.obj["spec"]["replicas"] for c in tenant.history("poolscalers") if c.name == "coder-decode"]
    assert sorted(sizes) == sizes
    tenant.wait_quiet()
