"""What keeps a service from being ready is in its status: by name, with the words of who knows."""

from typing import Any

import pytest

from tests.cluster.fake_kubelet import GPU, Behaviour, Outcome
from tests.cluster.mirror import condition_of
from tests.cluster.site import Site, Tenant, service

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("operator")]

GPU_POD = {"spec": {"containers": [{"name": "engine", "resources": {"limits": {GPU: "1"}}}]}}

FAILURES = {
    "crash loop": (Behaviour(Outcome.CRASH_LOOP, "boom: no such device"), "CrashLooping", "boom: no such device"),
    "model that cannot be loaded": (
        Behaviour(Outcome.CRASH_LOOP, "error: --model: no such folder /models/target"),
        "ModelLoadFailed",
        "no such folder /models/target",
    ),
    "tokenizers that do not fit": (
        Behaviour(Outcome.CRASH_LOOP, "error: TokenizerMismatch: the draft has 100 tokens"),
        "TokenizerMismatch",
        "the draft has 100 tokens",
    ),
    "memory": (Behaviour(Outcome.OUT_OF_MEMORY), "OutOfMemory", "memory"),
    "image": (
        Behaviour(Outcome.IMAGE_PULL, "manifest for engine:1 not found"),
        "ImagePullFailed",
        "engine:1 not found",
    ),
    "no node": (
        Behaviour(Outcome.UNSCHEDULABLE, "0/2 nodes: Insufficient gpu"),
        "InsufficientCapacity",
        "Insufficient gpu",
    ),
    "loading": (Behaviour(Outcome.NEVER_READY), "ModelLoading", "running and not ready yet"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_failure_of_pods_is_named_with_its_message(tenant: Tenant, what: str) -> None:
    behaviour, reason, message = FAILURES[what]
    tenant.behave(behaviour, pool="decode")
    tenant.apply(service())
    ready = tenant.wait_reason(reason)
    assert ready["status"] == "False"
    assert message in ready["message"]
    assert tenant.condition("DecodeReady")["reason"] == reason
    assert tenant.pool("decode")["reason"] == reason
    assert tenant.condition("PrefillReady")["status"] == "True"
    if reason != "ModelLoading":
        tenant.wait(lambda: tenant.events("PodFailed"), what="there is an event PodFailed")
        assert message in tenant.events("PodFailed")[0]["message"]

    tenant.behave(Behaviour(), pool="decode")
    tenant.wait_ready()


def test_quota_that_refuses_pods_is_named(site: Site, tenant: Tenant) -> None:
    quota = {"metadata": {"name": "few-pods"}, "spec": {"hard": {"pods": "2"}}}
    site.api.create("resourcequotas", tenant.namespace, quota)

    def is_in_force() -> bool:
        found = site.api.get("resourcequotas", tenant.namespace, "few-pods") or {}
        return bool((found.get("status") or {}).get("hard"))

    tenant.wait(is_in_force, what="the quota is in force")
    tenant.apply(service(decode={"replicas": 3}))
    ready = tenant.wait_reason("InsufficientCapacity")
    assert "exceeded quota: few-pods" in ready["message"]

    site.api.patch("resourcequotas", tenant.namespace, "few-pods", {"spec": {"hard": {"pods": "20"}}})
    tenant.wait_ready(timeout_seconds=120)


def test_service_waits_for_gpus_and_starts_when_they_are_free(site: Site, tenant: Tenant) -> None:
    site.kubelet.limit_gpus(tenant.namespace, 2)
    tenant.apply(service("first", prefill=None, decode={"replicas": 2, "template": GPU_POD}))
    tenant.wait_ready("first")
    tenant.apply(service("second", prefill=None, decode={"replicas": 1, "template": GPU_POD}))
    ready = tenant.wait_reason("InsufficientCapacity", name="second")
    assert f"Insufficient {GPU}" in ready["message"]
    tenant.change("first", decode={"replicas": 1})
    tenant.wait_ready("second")


def test_one_failing_pod_among_others_is_named(tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    tenant.behave(Behaviour(Outcome.CRASH_LOOP, "boom"), pool="decode", image="engine:1")
    tenant.wait_reason("CrashLooping")
    tenant.behave(Behaviour())
    tenant.wait_ready()


def test_rollout_without_progress_is_reported_as_stalled(tenant: Tenant) -> None:
    tenant.behave(Behaviour(Outcome.NEVER_READY), image="engine:stuck")
    tenant.apply(service(rollout={"progressDeadlineSeconds": 3}))
    tenant.wait_ready()
    tenant.change(engine={"image": "engine:stuck"})
    progressing = tenant.wait_reason("RolloutStalled", type_="Progressing")
    assert progressing["status"] == "False"
    assert "no progress for 3 s" in progressing["message"]
    tenant.wait(lambda: tenant.events("RolloutStalled"), what="there is an event RolloutStalled")
    assert len(tenant.ready_pods("decode")) == 2

    tenant.change(engine={"image": "engine:good"})
    tenant.wait_ready()


def test_spec_that_cannot_be_served_is_refused_by_name_and_what_runs_stays(tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    pods = {pod["metadata"]["uid"] for pod in tenant.pods()}
    tenant.change(budget={"maxGPUs": 4})
    ready = tenant.wait_reason("InvalidSpec")
    assert "spec.budget" in ready["message"]
    assert {pod["metadata"]["uid"] for pod in tenant.ready_pods()} == pods
    tenant.wait(lambda: tenant.events("InvalidSpec"), what="there is an event InvalidSpec")

    tenant.change(budget=None)
    tenant.wait_ready()
    assert {pod["metadata"]["uid"] for pod in tenant.ready_pods()} == pods


def test_object_that_the_cluster_refuses_is_named_and_keeps_no_other_from_being_made(tenant: Tenant) -> None:
    template: dict[str, Any] = {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "-1"}}}]}}
    tenant.apply(service(decode={"replicas": 1, "template": template}))
    ready = tenant.wait_reason("ApplyFailed")
    assert "coder-decode-" in ready["message"]
    assert "must be greater than or equal to 0" in ready["message"]
    tenant.wait(lambda: tenant.ready_pods("prefill"), what="prefill pods run")

    tenant.change(decode={"replicas": 1, "template": None})
    tenant.wait_ready()


def test_every_condition_is_there_from_the_first_status_on(tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    types = {
        *("Ready", "GatewayReady", "PrefillReady", "DecodeReady", "TrainingReady", "KVTransferReady"),
        *("SpeculationEffective", "ObjectivesMet", "DraftUpToDate", "Progressing", "UpgradeAvailable"),
    }
    for change in tenant.history("speculativeservices"):
        status = change.obj.get("status")
        if status:
            assert {c["type"] for c in status["conditions"]} == types
            observed = {c["observedGeneration"] for c in status["conditions"]}
            assert observed == {status["observedGeneration"]}
    assert condition_of(tenant.service(), "Ready")["status"] == "True"
