"""A user's pod template is merged as a strategic merge patch would, and what is ours stays ours."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.render.template import merge_pod_template

OURS: dict[str, Any] = {
    "metadata": {"labels": {"specserve.dev/pool": "decode"}},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
        "containers": [
            {
                "name": "engine",
                "image": "engine:1",
                "command": ["python"],
                "args": ["--x"],
                "env": [
                    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "HOME", "value": "/cache"},
                ],
                "ports": [{"name": "http", "containerPort": 8000}],
                "livenessProbe": {"httpGet": {"path": "/health", "port": "http"}, "failureThreshold": 30},
                "volumeMounts": [
                    {"name": "runtime", "mountPath": "/etc/runtime", "readOnly": True},
                    {"name": "cache", "mountPath": "/cache"},
                ],
            }
        ],
        "volumes": [{"name": "runtime", "configMap": {"name": "r"}}, {"name": "cache", "emptyDir": {}}],
    },
}


def merge(user: dict[str, Any]) -> dict[str, Any]:
    return merge_pod_template(OURS, user)


def engine(template: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in template["spec"]["containers"] if c["name"] == "engine")


def merge_engine(**fields: Any) -> dict[str, Any]:
    return engine(merge({"spec": {"containers": [{"name": "engine", **fields}]}}))


@pytest.mark.parametrize("user", [None, {}, {"metadata": {}}, {"spec": None}, {"spec": {"containers": []}}])
def test_an_empty_template_changes_nothing(user: dict[str, Any] | None) -> None:
    assert merge_pod_template(OURS, user) == OURS


def test_scheduling_fields_are_taken_over() -> None:
    user = {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "pull"}],
    }
    spec = merge({"spec": user})["spec"]
    assert {name: spec[name] for name in user} == user
    assert spec["containers"] == OURS["spec"]["containers"]


def test_resources_come_only_from_the_user() -> None:
    assert "resources" not in merge_engine()
    limits = {"limits": {"nvidia.com/gpu": 1}}
    assert merge_engine(resources=limits)["resources"] == limits


def test_objects_merge_by_field_and_null_removes_one() -> None:
    context = merge({"spec": {"securityContext": {"runAsUser": None, "fsGroup": 1}}})["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "fsGroup": 1}


def test_variables_merge_by_name_after_ours_and_cannot_change_the_pods_identity() -> None:
    env = merge_engine(
        env=[
            {"name": "POD_IP", "value": "1.2.3.4"},
            {"name": "HOME", "value": "/h"},
            {"name": "B", "value": "$(POD_IP)"},
        ]
    )["env"]
    assert env == [
        OURS["spec"]["containers"][0]["env"][0],
        {"name": "HOME", "value": "/h"},
        {"name": "B", "value": "$(POD_IP)"},
    ]


def test_labels_of_the_user_are_kept_below_ours() -> None:
    labels = {"team": "a", "specserve.dev/pool": "other"}
    metadata = merge({"metadata": {"labels": labels, "annotations": {"x": "y"}, "name": "mine"}})["metadata"]
    assert metadata == {"labels": {"team": "a", "specserve.dev/pool": "decode"}, "annotations": {"x": "y"}}


def test_a_volume_of_the_same_name_is_replaced_whole_unless_it_carries_our_settings() -> None:
    volumes = merge(
        {"spec": {"volumes": [{"name": "cache", "hostPath": {"path": "/c"}}, {"name": "runtime", "emptyDir": {}}]}}
    )["spec"]["volumes"]
    assert volumes == [{"name": "runtime", "configMap": {"name": "r"}}, {"name": "cache", "hostPath": {"path": "/c"}}]


def test_our_mounts_and_ports_stay_and_the_users_are_added() -> None:
    merged = merge_engine(
        volumeMounts=[{"name": "x", "mountPath": "/etc/runtime"}, {"name": "data", "mountPath": "/data"}],
        ports=[{"name": "web", "containerPort": 8000}, {"name": "debug", "containerPort": 5678}],
    )
    assert merged["volumeMounts"] == [
        *OURS["spec"]["containers"][0]["volumeMounts"],
        {"name": "data", "mountPath": "/data"},
    ]
    assert merged["ports"] == [{"name": "http", "containerPort": 8000}, {"name": "debug", "containerPort": 5678}]


def test_a_probe_is_adjusted_by_field_or_replaced_by_another_kind() -> None:
    assert merge_engine(livenessProbe={"failureThreshold": 3})["livenessProbe"] == {
        "httpGet": {"path": "/health", "port": "http"},
        "failureThreshold": 3,
    }
    assert merge_engine(livenessProbe={"exec": {"command": ["true"]}})["livenessProbe"] == {
        "exec": {"command": ["true"]},
        "failureThreshold": 30,
    }
    assert merge_engine(livenessProbe={"httpGet": {"path": "/alive"}})["livenessProbe"] == {
        "httpGet": {"path": "/alive", "port": "http"},
        "failureThreshold": 30,
    }
    assert (
        merge_engine(livenessProbe={"exec": None})["livenessProbe"] == (OURS["spec"]["containers"][0]["livenessProbe"])
    )


def test_other_containers_are_added_behind_ours() -> None:
    names = [c["name"] for c in merge({"spec": {"containers": [{"name": "log"}]}})["spec"]["containers"]]
    assert names == ["engine", "log"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "metadata": st.fixed_dictionaries({"labels": st.dictionaries(st.text(max_size=3), st.text(max_size=3))}),
            "spec": st.dictionaries(st.sampled_from(["nodeSelector", "hostNetwork", "tolerations"]), json_values),
        },
    )
)
def test_merging_changes_neither_argument_and_twice_is_once(user: dict[str, Any]) -> None:
    ours, given_user = deepcopy(OURS), deepcopy(user)
    once = merge_pod_template(OURS, user)
    assert (ours, given_user) == (OURS, user)
    assert merge_pod_template(once, user) == once
