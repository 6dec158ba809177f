"""The operator is killed in the middle of its work, between any two of its writes: the next one goes on from there."""

import os

import pytest

from tests.cluster.apiserver.rollouts import change_image, counts, lowest_ready, most_wanted, start, wait_served_by
from tests.cluster.fake_kubelet import Behaviour
from tests.cluster.operator_process import OperatorProcess, tracebacks
from tests.cluster.site import Site, Tenant, service

pytestmark = pytest.mark.cluster

# After how many writes of a rollout the operator is killed. A whole rollout takes about thirty.
KILLS = range(1, 31) if os.environ.get("SPECSERVE_SOAK") else (1, 4, 9, 15)
_ROLLOUT_SECONDS = 120.0


@pytest.mark.timeout(_ROLLOUT_SECONDS * len(KILLS))
def test_rollout_goes_on_after_the_operator_was_killed_at_any_step(
    site: Site, operator: OperatorProcess, tenant: Tenant
) -> None:
    tenant.behave(Behaviour(start_seconds=0.2))
    start(tenant, decode={"replicas": 2}, prefill={"replicas": 1})
    for kill in KILLS:
        image, mark, writes = f"engine:after-{kill}", tenant.mirror.mark(), site.writes.mark()
        change_image(tenant, image)
        site.writes.wait_count(
            writes + kill,
            timeout_seconds=_ROLLOUT_SECONDS,
            unless=lambda: tenant.condition("Progressing").get("reason") == "RolloutComplete",
        )
        operator.restart()
        wait_served_by(tenant, image, timeout_seconds=_ROLLOUT_SECONDS)
        assert lowest_ready(tenant, "decode", mark) >= 2, f"killed after {kill} writes"
        assert lowest_ready(tenant, "prefill", mark) >= 1, f"killed after {kill} writes"
        assert most_wanted(tenant, "decode", mark) <= 3, f"killed after {kill} writes"
        assert counts(tenant) == {"prefill": 1, "decode": 2, "gateway": 1}
    assert list(tracebacks(operator.log())) == []


@pytest.mark.parametrize("kill", range(1, 14) if os.environ.get("SPECSERVE_SOAK") else (3, 10))
def test_new_service_is_completed_by_the_next_operator(
    site: Site, operator: OperatorProcess, tenant: Tenant, kill: int
) -> None:
    writes = site.writes.mark()
    tenant.apply(service())
    site.writes.wait_count(
        writes + kill, timeout_seconds=60, unless=lambda: tenant.condition("Ready").get("status") == "True"
    )
    operator.restart()
    tenant.wait_ready()
    names = [name for plural, name in tenant.children() if plural == "deployments"]
    assert len(names) == 3
    assert counts(tenant) == {"prefill": 1, "decode": 2, "gateway": 1}


def test_spec_that_is_changed_while_no_operator_runs_is_rolled_out_by_the_next(
    site: Site, operator: OperatorProcess, tenant: Tenant
) -> None:
    mark = start(tenant)
    operator.kill()
    change_image(tenant, "engine:meanwhile")
    pod = tenant.pods("decode")[0]["metadata"]["name"]
    site.api.delete("pods", tenant.namespace, pod)
    site.api.delete("services", tenant.namespace, "coder-gateway")
    operator.start()
    wait_served_by(tenant, "engine:meanwhile")
    assert tenant.mirror.get("services", tenant.namespace, "coder-gateway") is not None
    assert most_wanted(tenant, "decode", mark) <= 3


def test_service_that_is_deleted_while_no_operator_runs_is_not_brought_back(
    site: Site, operator: OperatorProcess, tenant: Tenant
) -> None:
    start(tenant)
    operator.kill()
    tenant.delete()
    tenant.wait(lambda: not tenant.children() and not tenant.pods(), what="everything is gone")
    writes = site.writes.mark()
    operator.start()
    assert site.writes.since(writes, namespace=tenant.namespace) == []
