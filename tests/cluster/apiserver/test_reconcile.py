"""From a service to its objects, and from its pods to what users see."""

import pytest

from tests.cluster.fake_kubelet import Behaviour, Outcome
from tests.cluster.mirror import condition_of
from tests.cluster.operator_process import ENGINE_IMAGE, GATEWAY_IMAGE
from tests.cluster.site import Tenant, content_of, revision_of, service

EXTERNAL = {"scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 2}}

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("operator")]


def test_service_gets_the_objects_that_serve_it_and_becomes_ready(tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    prefill, decode, gateway = (tenant.deployment(pool) for pool in ("prefill", "decode", "gateway"))
    target = decode["metadata"]["labels"]["specserve.dev/target-revision"]
    revisions = [name for plural, name in tenant.children() if plural == "controllerrevisions"]
    assert set(tenant.children()) == {
        ("configmaps", "coder-runtime"),
        ("configmaps", "coder-trust"),
        ("deployments", f"coder-prefill-{revision_of(prefill)}"),
        ("deployments", f"coder-decode-{revision_of(decode)}"),
        ("deployments", f"coder-gateway-{revision_of(gateway)}"),
        ("services", "coder-gateway"),
        ("services", f"coder-prefill-{target}"),
        ("serviceaccounts", "coder-gateway"),
        ("roles", "coder-gateway"),
        ("rolebindings", "coder-gateway"),
        ("poddisruptionbudgets", "coder-decode"),
        *(("networkpolicies", f"coder-{pool}") for pool in ("prefill", "decode", "gateway")),
        *(("controllerrevisions", name) for name in revisions),
    }
    assert [d["spec"]["replicas"] for d in (prefill, decode, gateway)] == [1, 2, 1]
    images = [d["spec"]["template"]["spec"]["containers"][0]["image"] for d in (prefill, decode, gateway)]
    assert images == [ENGINE_IMAGE, ENGINE_IMAGE, GATEWAY_IMAGE]
    assert len(tenant.ready_pods("decode")) == 2


def test_nothing_of_a_new_service_is_refused(tenant: Tenant) -> None:
    """Objects are applied concurrently, but a binding not before its role, which the API server looks up."""
    names = [f"s{number}" for number in range(12)]
    for name in names:
        tenant.apply(service(name))
    for name in names:
        tenant.wait_ready(name)
    assert [e["message"] for name in names for e in tenant.events("ApplyFailed", name)] == []


def test_every_object_names_its_service_and_its_owner(tenant: Tenant) -> None:
    tenant.apply(service())
    owner = tenant.wait_ready()
    for where, child in tenant.children().items():
        labels, references = child["metadata"]["labels"], child["metadata"]["ownerReferences"]
        assert labels["app.kubernetes.io/managed-by"] == "specserve", where
        assert labels["app.kubernetes.io/instance"] == "coder", where
        assert references == [
            {
                "apiVersion": "specserve.dev/v1alpha1",
                "kind": "SpeculativeService",
                "name": "coder",
                "uid": owner["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ], where


def test_users_see_readiness_and_pools_in_the_columns(tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    kubectl = tenant.site.control_plane.kubectl
    head, row = kubectl("get", "spsvc", "-n", tenant.namespace).splitlines()
    assert head.split()[:4] == ["NAME", "READY", "PREFILL", "DECODE"]
    assert head.split()[-6:] == ["TTFT", "TPOT", "ACCEPT", "SPEC", "DRAFT", "AGE"]
    assert row.split()[:4] == ["coder", "True", "1/1", "2/2"]
    head, row = kubectl("get", "spsvc", "-n", tenant.namespace, "-o", "wide").splitlines()
    assert head.split()[-3:] == ["REASON", "SPEEDUP", "KV-FALLBACKS"]
    assert "AllPoolsReady" in row.split()


def test_users_see_conditions_and_events_in_the_description(tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    for reason in ("RolloutStarted", "RolloutComplete", "ServiceReady"):
        tenant.wait(lambda reason=reason: tenant.events(reason), what=f"there is an event {reason}")  # type: ignore[misc]
    text = tenant.site.control_plane.kubectl("describe", "spsvc", "coder", "-n", tenant.namespace)
    assert "AllPoolsReady" in text
    events = text[text.index("Events:") :]
    assert "RolloutStarted" in events
    assert "prefill 1/1, decode 2/2, gateway 1/1" in events


def test_service_is_not_ready_before_its_pods_are(tenant: Tenant) -> None:
    tenant.behave(Behaviour(Outcome.NEVER_READY), pool="decode")
    tenant.apply(service())
    tenant.wait_reason("ModelLoading")
    assert tenant.condition("DecodeReady")["status"] == "False"
    assert tenant.pool("decode")["ready"] == 0

    tenant.behave(Behaviour(), pool="decode")
    tenant.wait_ready()
    ready = [
        change
        for change in tenant.history("speculativeservices")
        if condition_of(change.obj, "Ready").get("status") == "True"
    ]
    pods = [c for c in tenant.history("pods") if c.number < ready[0].number]
    assert {c.name for c in pods if condition_of(c.obj, "Ready").get("status") == "True"} >= {
        pod["metadata"]["name"] for pod in tenant.ready_pods("decode")
    }


def test_pool_that_leaves_the_spec_takes_its_objects_along(tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    tenant.change(prefill=None)
    tenant.wait_ready()
    tenant.wait(lambda: not tenant.pods("prefill"), what="no prefill pods")
    left = {name for plural, name in tenant.children() if "prefill" in name and plural != "controllerrevisions"}
    assert left == set()
    assert tenant.condition("PrefillReady")["reason"] == "NotConfigured"


def test_service_with_the_longest_name_gets_objects_with_valid_names(tenant: Tenant) -> None:
    name = "a23456789-123456789-123456789-123456"
    assert len(name) == 36
    tenant.apply(service(name, decode=EXTERNAL))
    tenant.wait_ready(name)
    assert max(len(pod["metadata"]["name"]) for pod in tenant.pods()) <= 63
    assert ("poolscalers", f"{name}-decode") in tenant.children(name)


def test_services_whose_names_begin_alike_do_not_meet(tenant: Tenant) -> None:
    names = ("coder", "coder-gateway", "coder-prefill")
    for name in names:
        tenant.apply(service(name))
    for name in names:
        owner = tenant.wait_ready(name)
        owners = {r["uid"] for child in tenant.children(name).values() for r in child["metadata"]["ownerReferences"]}
        assert owners == {owner["metadata"]["uid"]}
    assert len(tenant.ready_pods()) == 12


def test_object_of_somebody_else_under_a_name_of_ours_is_left_alone_and_named(tenant: Tenant) -> None:
    mine = {"metadata": {"name": "coder-runtime", "labels": {"team": "search"}}, "data": {"mine": "1"}}
    tenant.api.create("configmaps", tenant.namespace, mine)
    tenant.apply(service())
    ready = tenant.wait_reason("ApplyFailed")
    assert "coder-runtime" in ready["message"]
    found = tenant.mirror.get("configmaps", tenant.namespace, "coder-runtime")
    assert found is not None
    assert (found["data"], found["metadata"]["labels"]) == ({"mine": "1"}, {"team": "search"})
    assert "ownerReferences" not in found["metadata"]

    tenant.api.delete("configmaps", tenant.namespace, "coder-runtime")
    tenant.change(gateway={"port": 81})
    tenant.wait_ready()


def test_users_pod_templates_reach_the_pods(tenant: Tenant) -> None:
    template = {
        "metadata": {"labels": {"team": "search"}, "annotations": {"example.com/a": "b"}},
        "spec": {
            "nodeSelector": {"pool": "decode"},
            "tolerations": [{"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "imagePullSecrets": [{"name": "pull"}],
            "containers": [
                {"name": "engine", "resources": {"limits": {"amd.com/gpu": 2}}, "env": [{"name": "A", "value": "1"}]},
                {"name": "proxy", "image": "proxy:1"},
            ],
            "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        },
    }
    tenant.apply(service(decode={"replicas": 1, "template": template}))
    tenant.wait_ready()
    (pod,) = tenant.pods("decode")
    spec = pod["spec"]
    engine, proxy = spec["containers"]
    assert pod["metadata"]["labels"]["team"] == "search"
    assert pod["metadata"]["annotations"]["example.com/a"] == "b"
    assert spec["nodeSelector"] == {"pool": "decode"}
    assert "amd.com/gpu" in {toleration.get("key") for toleration in spec["tolerations"]}
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert engine["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert {"name": "A", "value": "1"} in engine["env"]
    assert (proxy["name"], spec["initContainers"][0]["name"]) == ("proxy", "fetch")


def test_service_without_certificates_has_no_trust_bundle(tenant: Tenant) -> None:
    tenant.apply(service(kvTransfer={"tls": "Disabled"}))
    tenant.wait_ready()
    assert ("configmaps", "coder-trust") not in tenant.children()


def test_changed_port_reaches_the_service_and_restarts_no_pod(tenant: Tenant) -> None:
    tenant.apply(service())
    tenant.wait_ready()
    pods = {pod["metadata"]["uid"] for pod in tenant.pods()}
    tenant.change(gateway={"port": 8080})
    tenant.wait(lambda: tenant.status().get("endpoint", "").endswith(":8080"), what="the endpoint has the new port")
    gateway = tenant.mirror.get("services", tenant.namespace, "coder-gateway")
    assert gateway is not None
    assert [port["port"] for port in gateway["spec"]["ports"]] == [8080]
    assert {pod["metadata"]["uid"] for pod in tenant.pods()} == pods


def test_run_time_settings_change_without_restarting_pods(tenant: Tenant) -> None:
    draft = {"method": "DraftModel", "uri": "file:///models/draft"}
    tenant.apply(service(speculation={"draft": draft}))
    tenant.wait_ready()
    pods = {pod["metadata"]["uid"] for pod in tenant.pods()}
    tenant.change(speculation={"mode": "Never"})

    def settings() -> str:
        config = tenant.mirror.get("configmaps", tenant.namespace, "coder-runtime")
        return "" if config is None else str(config["data"]["state.json"])

    tenant.wait(lambda: '"Off"' in settings(), what="the pods' settings say Off")
    tenant.wait_ready()
    assert {pod["metadata"]["uid"] for pod in tenant.pods()} == pods


def test_services_leave_each_other_alone(tenant: Tenant) -> None:
    tenant.apply(service("one"))
    tenant.apply(service("two", prefill=None))
    tenant.wait_ready("one")
    tenant.wait_ready("two")
    before = {where: content_of(child) for where, child in tenant.children("one").items()}
    tenant.delete("two")
    tenant.wait(lambda: not tenant.children("two"), what="the objects of service two are gone")
    assert {where: content_of(child) for where, child in tenant.children("one").items()} == before
    assert tenant.condition("Ready", "one")["status"] == "True"


def test_ready_is_never_true_for_a_spec_that_is_not_served_yet(tenant: Tenant) -> None:
    tenant.behave(Behaviour(start_seconds=0.3))
    tenant.apply(service())
    tenant.wait_ready()
    mark = tenant.mirror.mark()
    tenant.change(engine={"args": ["--seed", "7"]})
    tenant.wait_ready()
    wanted = revision_of(tenant.deployment("decode"))
    for change in tenant.history("speculativeservices", mark):
        ready = condition_of(change.obj, "Ready")
        if ready["status"] == "True" and ready["observedGeneration"] == change.obj["metadata"]["generation"]:
            decode = next(p for p in change.obj["status"]["pools"] if p["name"] == "decode")
            assert (decode["revision"], decode["ready"], decode["updated"]) == (wanted, 2, 2)
