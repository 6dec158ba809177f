"""Rollouts with pods that come and go: enough of them serve at every moment, and nothing is left of before."""

import pytest

from tests.cluster.apiserver.rollouts import (
    change_image,
    counts,
    is_turned,
    lonely_decode_targets,
    lowest_ready,
    most_wanted,
    start,
    wait_served_by,
)
from tests.cluster.fake_kubelet import GPU, Behaviour, Outcome
from tests.cluster.site import Site, Tenant, revision_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("operator")]

SLOW = Behaviour(start_seconds=0.2, stop_seconds=0.1)
GPU_POD = {"spec": {"containers": [{"name": "engine", "resources": {"limits": {GPU: "1"}}}]}}


@pytest.fixture(autouse=True)
def _slow_pods(tenant: Tenant) -> None:
    """Pods take a moment to start and to stop, so that a rollout has steps."""
    tenant.behave(SLOW)


def test_all_wanted_pods_serve_at_every_moment_of_a_rollout_and_decode_pods_with_prefill_pods(tenant: Tenant) -> None:
    mark = start(tenant, decode={"replicas": 3}, prefill={"replicas": 2})
    change_image(tenant, "engine:b")
    wait_served_by(tenant, "engine:b")
    assert (lowest_ready(tenant, "decode", mark), lowest_ready(tenant, "prefill", mark)) == (3, 2)
    assert (most_wanted(tenant, "decode", mark), most_wanted(tenant, "prefill", mark)) == (4, 3)
    assert lonely_decode_targets(tenant, mark) == set()
    assert counts(tenant) == {"prefill": 2, "decode": 3, "gateway": 1}


def test_rollout_that_is_taken_back_keeps_the_pods_it_had_not_replaced(tenant: Tenant) -> None:
    mark = start(tenant, decode={"replicas": 3})
    first = revision_of(tenant.deployment("decode"))
    pods = {pod["metadata"]["uid"] for pod in tenant.pods("decode")}
    change_image(tenant, "engine:b")
    tenant.wait(lambda: is_turned(tenant, "engine:b"), what="a pod of revision B serves")
    change_image(tenant, "engine:1")
    wait_served_by(tenant, "engine:1")
    assert revision_of(tenant.deployment("decode")) == first
    assert pods & {pod["metadata"]["uid"] for pod in tenant.pods("decode")}
    assert lowest_ready(tenant, "decode", mark) == 3
    assert most_wanted(tenant, "decode", mark) == 4


def test_rollout_that_is_overtaken_by_another_ends_at_the_last(tenant: Tenant) -> None:
    mark = start(tenant, decode={"replicas": 3})
    change_image(tenant, "engine:b")
    tenant.wait(lambda: is_turned(tenant, "engine:b"), what="a pod of revision B serves")
    change_image(tenant, "engine:c")
    wait_served_by(tenant, "engine:c")
    assert (lowest_ready(tenant, "decode", mark), most_wanted(tenant, "decode", mark)) == (3, 4)
    assert counts(tenant) == {"prefill": 1, "decode": 3, "gateway": 1}


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 2)])
def test_pool_that_is_scaled_in_the_middle_of_a_rollout_keeps_enough_pods(
    tenant: Tenant, first: int, then: int
) -> None:
    mark = start(tenant, decode={"replicas": first})
    change_image(tenant, "engine:b")
    tenant.wait(lambda: is_turned(tenant, "engine:b"), what="a pod of revision B serves")
    tenant.change(decode={"replicas": then})
    wait_served_by(tenant, "engine:b")
    assert lowest_ready(tenant, "decode", mark) == min(first, then)
    assert most_wanted(tenant, "decode", mark) <= max(first, then) + 1
    assert counts(tenant)["decode"] == then


def test_single_pods_are_replaced_without_a_gap(tenant: Tenant) -> None:
    mark = start(tenant, decode={"replicas": 1})
    change_image(tenant, "engine:b")
    wait_served_by(tenant, "engine:b")
    assert (lowest_ready(tenant, "decode", mark), lowest_ready(tenant, "prefill", mark)) == (1, 1)


def test_rollout_without_surge_moves_on_a_full_cluster(site: Site, tenant: Tenant) -> None:
    site.kubelet.limit_gpus(tenant.namespace, 5)
    mark = start(
        tenant,
        decode={"replicas": 3, "template": GPU_POD},
        prefill={"replicas": 2, "template": GPU_POD},
        rollout={"maxSurge": 0, "maxUnavailable": 1},
    )
    change_image(tenant, "engine:b")
    wait_served_by(tenant, "engine:b")
    assert (lowest_ready(tenant, "decode", mark), most_wanted(tenant, "decode", mark)) == (2, 3)
    assert (lowest_ready(tenant, "prefill", mark), most_wanted(tenant, "prefill", mark)) == (1, 2)


def test_old_pods_that_fail_are_replaced_first_and_hold_up_nothing(tenant: Tenant) -> None:
    mark = start(tenant, decode={"replicas": 3})
    failing = tenant.pods("decode")[0]
    tenant.site.kubelet.fail_pod(tenant.namespace, failing["metadata"]["name"], Behaviour(Outcome.CRASH_LOOP, "boom"))
    tenant.wait(lambda: len(tenant.ready_pods("decode")) == 2, what="one decode pod has failed")
    change_image(tenant, "engine:b")
    tenant.wait(
        lambda: failing["metadata"]["name"] not in {pod["metadata"]["name"] for pod in tenant.pods("decode")},
        what="the failed pod was replaced",
    )
    assert len(tenant.ready_pods("decode")) >= 2
    wait_served_by(tenant, "engine:b")
    assert lowest_ready(tenant, "decode", mark) == 2


def test_new_revision_that_never_gets_ready_costs_no_serving_pod(tenant: Tenant) -> None:
    tenant.behave(Behaviour(Outcome.CRASH_LOOP, "boom"), image="engine:bad")
    mark = start(tenant, decode={"replicas": 3}, rollout={"progressDeadlineSeconds": 3})
    change_image(tenant, "engine:bad")
    tenant.wait_reason("RolloutStalled", type_="Progressing")
    assert len(tenant.ready_pods("decode")) == 3
    change_image(tenant, "engine:c")
    wait_served_by(tenant, "engine:c")
    assert (lowest_ready(tenant, "decode", mark), lowest_ready(tenant, "prefill", mark)) == (3, 1)


def test_change_of_one_pool_restarts_that_pool_only(tenant: Tenant) -> None:
    start(tenant)
    others = {pod["metadata"]["uid"] for pool in ("prefill", "gateway") for pod in tenant.pods(pool)}
    decode = {pod["metadata"]["uid"] for pod in tenant.pods("decode")}
    env = [{"name": "MORE", "value": "1"}]
    tenant.change(decode={"template": {"spec": {"containers": [{"name": "engine", "env": env}]}}})

    def is_replaced() -> bool:
        return not decode & {pod["metadata"]["uid"] for pod in tenant.pods("decode")}

    tenant.wait(is_replaced, what="all decode pods are new")
    tenant.wait_ready()
    assert {pod["metadata"]["uid"] for pool in ("prefill", "gateway") for pod in tenant.pods(pool)} == others


def test_old_revision_stays_until_its_last_pod_has_ended(tenant: Tenant) -> None:
    tenant.behave(Behaviour(start_seconds=0.1, stop_seconds=3))
    start(tenant)
    old = tenant.deployment("decode")["metadata"]["name"]
    change_image(tenant, "engine:b")
    tenant.wait(
        lambda: tenant.mirror.get("deployments", tenant.namespace, old) is None, what="the old Deployment is gone"
    )
    gone = next(c for c in tenant.history("deployments") if c.type == "DELETED" and c.name == old)
    left = [c for c in tenant.history("pods", gone.number) if c.type == "DELETED" and c.name.startswith(old)]
    assert left == []
    wait_served_by(tenant, "engine:b")
