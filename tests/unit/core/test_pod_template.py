"""What a user's pod template may not take away from ours, whatever else it changes."""

from typing import Any

import pytest

from specserve_operator.core.plan import plan
from specserve_operator.core.pod_template import template_problems
from specserve_operator.render import render
from tests.unit.core.builders import DRAFT_MODEL, deployments_of, make_service, make_snapshot

# Two pools whose pods have everything that pods can have: claims, a token, a draft.
SPEC: dict[str, Any] = {
    "model": {"uri": "pvc://models/coder", "secretName": "hub"},
    "speculation": {"draft": DRAFT_MODEL},
}


def rendered_pod(pool: str) -> dict[str, Any]:
    (deployment,) = deployments_of(render(plan(make_snapshot(make_service(**SPEC)))), pool)
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod


def container_problems(name: str = "engine", **fields: Any) -> list[str]:
    return [*template_problems("t", {"spec": {"containers": [{"name": name, **fields}]}}, name)]


@pytest.mark.parametrize(("pool", "name"), [("decode", "engine"), ("gateway", "gateway")])
def test_no_field_that_is_rendered_can_be_removed_by_null(pool: str, name: str) -> None:
    pod = rendered_pod(pool)
    fields = pod["containers"][0].keys() - {"name"}
    assert {"lifecycle", "readinessProbe", "ports", "command", "securityContext"} <= fields
    for field in fields:
        (problem,) = container_problems(name, **{field: None})
        assert problem.startswith(f"t.spec.containers[{name}].{field}"), problem
    for field in pod.keys() - {"containers"}:
        (problem,) = template_problems("t", {"spec": {field: None}}, name)
        assert problem.startswith(f"t.spec.{field}: "), problem


def test_the_error_for_null_says_what_to_do() -> None:
    assert container_problems(lifecycle=None) == [
        "t.spec.containers[engine].lifecycle: null would remove what the operator sets; leave it out, or give values "
        "that differ"
    ]


def test_null_is_allowed_where_there_is_nothing_of_ours_and_for_single_values() -> None:
    assert container_problems(resources=None, securityContext={"readOnlyRootFilesystem": None}) == []
    template = {"spec": {"nodeSelector": None, "securityContext": {"runAsUser": None}}}
    assert [*template_problems("t", template, "engine")] == []


def test_other_containers_are_the_users() -> None:
    sidecar = {"name": "sidecar", "lifecycle": None, "command": None, "readinessProbe": 1}
    assert [*template_problems("t", {"spec": {"containers": [sidecar]}}, "engine")] == []


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_probe_may_be_changed_and_not_emptied(probe: str) -> None:
    for change in ({"periodSeconds": 7}, {"httpGet": {"path": "/x"}}, {"httpGet": None, "exec": {"command": ["true"]}}):
        assert container_problems(**{probe: change}) == []
    assert container_problems(**{probe: {"exec": None}}) == []
    (problem,) = container_problems(**{probe: {"httpGet": None}})
    assert (
        problem == f"t.spec.containers[engine].{probe}.httpGet: null leaves the probe without an action; give another"
    )


@pytest.mark.parametrize("field", ["startupProbe", "readinessProbe", "livenessProbe", "securityContext", "lifecycle"])
def test_an_object_of_ours_is_merged_with_an_object(field: str) -> None:
    assert container_problems(**{field: 1}) == [f"t.spec.containers[engine].{field}: must be an object"]
    assert container_problems(**{field: []}) == [f"t.spec.containers[engine].{field}: must be an object"]


def test_the_pods_own_security_context_is_merged_with_an_object() -> None:
    problems = [*template_problems("t", {"spec": {"securityContext": "none"}}, "engine")]
    assert problems == ["t.spec.securityContext: must be an object"]
