"""What a user's cluster asks of pods reaches the pods of every pool: scheduling, hardware, registries, patience."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import plan
from specserve_operator.render import render, render_seeds
from tests.unit.core.builders import CONFIG, deployments_of, disaggregated, make_service, make_snapshot

POOLS = [("prefill", "engine"), ("decode", "engine"), ("gateway", "gateway")]


def pod(pool: str, template: Mapping[str, Any] | None = None, **spec: Any) -> Manifest:
    """The pod's spec as it is rendered for one pool with that template."""
    own = {} if template is None else {"template": template}
    objects = render(plan(make_snapshot(disaggregated(**{pool: own}, **spec))))
    (deployment,) = deployments_of(objects, pool)
    found: Manifest = deployment["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize(("pool", "container"), POOLS)
@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-3g.40gb", "example.com/npu"])
def test_accelerators_of_any_vendor_are_asked_for_as_they_are_named(pool: str, container: str, resource: str) -> None:
    resources = {"limits": {resource: 2, "memory": "80Gi"}, "requests": {"cpu": "4"}}
    rendered = pod(pool, {"spec": {"containers": [{"name": container, "resources": resources}]}})
    assert rendered["containers"][0]["resources"] == resources
    assert "nvidia" not in str(rendered).replace(resource, ""), "no vendor is taken for granted"


@pytest.mark.parametrize(("pool", "container"), POOLS)
def test_without_a_template_nothing_is_asked_of_the_cluster(pool: str, container: str) -> None:
    rendered = pod(pool)
    assert [c["name"] for c in rendered["containers"]] == [container]
    assert "resources" not in rendered["containers"][0]
    for field in ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "imagePullSecrets", "hostNetwork"):
        assert field not in rendered


@pytest.mark.parametrize(("pool", "container"), POOLS)
def test_scheduling_runtime_class_and_pull_secrets_pass_through_on_every_pool(pool: str, container: str) -> None:
    fields = {
        "nodeSelector": {"pool": pool},
        "tolerations": [{"key": "example.com/npu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [
            {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "runtimeClassName": "kata",
        "priorityClassName": "serving",
        "schedulerName": "volcano",
        "imagePullSecrets": [{"name": "registry"}],
        "hostIPC": False,
    }
    rendered = pod(pool, {"spec": fields})
    assert {name: rendered[name] for name in fields} == fields
    assert rendered["containers"][0]["name"] == container


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_liveness_is_patient_for_minutes_and_readiness_for_seconds(pool: str) -> None:
    """Kernels that are compiled at the first request take a minute and more."""
    container = pod(pool)["containers"][0]

    def seconds(probe: str) -> int:
        return int(container[probe]["periodSeconds"] * container[probe]["failureThreshold"])

    assert seconds("livenessProbe") >= 300
    assert seconds("readinessProbe") <= 10
    assert seconds("startupProbe") == 1800
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize(("pool", "container"), POOLS)
def test_the_time_to_start_can_be_lengthened_for_large_models(pool: str, container: str) -> None:
    probe = {"name": container, "startupProbe": {"failureThreshold": 5400}}
    ours, longer = pod(pool), pod(pool, {"spec": {"containers": [probe]}})
    assert longer["containers"][0]["startupProbe"] == {
        **ours["containers"][0]["startupProbe"],
        "failureThreshold": 5400,
    }


def test_names_and_label_values_of_the_longest_service_fit_whatever_is_rendered() -> None:
    external = {"scaling": {"mode": "External", "minReplicas": 2, "maxReplicas": 2}}
    service = make_service(prefill=external, decode=external)
    long = service.model_copy(update={"metadata": service.metadata.model_copy(update={"name": "a" * 36})})
    plan_ = plan(make_snapshot(long, config=replace(CONFIG, pod_monitors=True)))
    objects = [*render_seeds(plan_), *render(plan_)]
    assert {"PoolScaler", "ControllerRevision", "NetworkPolicy", "PodMonitor"} <= {o["kind"] for o in objects}
    for obj in objects:
        assert len(obj["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in obj["metadata"].get("labels", {}).values())


def test_nothing_that_is_rendered_holds_up_a_deletion() -> None:
    plan_ = plan(make_snapshot(disaggregated(), config=replace(CONFIG, pod_monitors=True)))
    for obj in render(plan_):
        assert "finalizers" not in obj["metadata"]
        assert obj["metadata"]["ownerReferences"][0]["controller"] is True


def test_versions_are_in_no_selector_and_recommended_labels_on_every_object() -> None:
    plan_ = plan(make_snapshot(disaggregated(), config=replace(CONFIG, pod_monitors=True)))
    for obj in render(plan_):
        labels = obj["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "speculative-service"
        assert labels["app.kubernetes.io/instance"] == "coder"
        assert labels["app.kubernetes.io/managed-by"] == labels["app.kubernetes.io/part-of"] == "specserve"
        assert "app.kubernetes.io" not in str(obj.get("spec", {}).get("selector", ""))
