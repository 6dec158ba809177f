"""From a container's spec to what is executed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.cluster.local.podspec import (
    Mount,
    PodConfigError,
    base_environment,
    expand,
    plan_launch,
    resolve_env,
    resolve_port,
    to_local_path,
)

POD: dict[str, Any] = {
    "metadata": {"name": "coder-decode-abc12", "namespace": "llm", "uid": "u-1", "labels": {"role": "decode"}},
    "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}]},
    "status": {"podIP": "127.77.0.5", "hostIP": "127.0.0.1"},
}


def nothing(kind: str, name: str) -> Mapping[str, bytes] | None:
    return None


def field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def test_known_references_are_replaced_and_others_stay() -> None:
    variables = {"POD_IP": "127.77.0.5"}
    assert expand("--host=$(POD_IP):$(PORT) $$(POD_IP) $5", variables) == "--host=127.77.0.5:$(PORT) $(POD_IP) $5"


@given(st.text(alphabet=st.characters(exclude_characters="$")))
def test_text_without_references_is_left_alone(text: str) -> None:
    assert expand(text, {"A": "x"}) == text


def test_environment_comes_from_the_downward_api_and_earlier_variables() -> None:
    container = {
        "name": "engine",
        "env": [
            field("POD_IP", "status.podIP"),
            field("POD_UID", "metadata.uid"),
            field("ROLE", "metadata.labels['role']"),
            {"name": "URL", "value": "http://$(POD_IP)/$(LATER)"},
            {"name": "LATER", "value": "x"},
        ],
    }
    assert resolve_env(POD, container, read_config=nothing) == {
        "POD_IP": "127.77.0.5",
        "POD_UID": "u-1",
        "ROLE": "decode",
        "URL": "http://127.77.0.5/$(LATER)",
        "LATER": "x",
    }


def test_environment_from_config_maps_and_secrets() -> None:
    def read(kind: str, name: str) -> Mapping[str, bytes] | None:
        return {("ConfigMap", "c"): {"A": b"1", "B": b"2"}, ("Secret", "s"): {"token": b"t"}}.get((kind, name))

    container = {
        "name": "engine",
        "envFrom": [
            {"prefix": "C_", "configMapRef": {"name": "c"}},
            {"configMapRef": {"name": "no", "optional": True}},
        ],
        "env": [
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
            {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "no", "optional": True}}},
        ],
    }
    assert resolve_env(POD, container, read_config=read) == {"C_A": "1", "C_B": "2", "TOKEN": "t"}


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}, "env T: Secret s has no key k"),
        ({"name": "T", "valueFrom": {"resourceFieldRef": {}}}, "env T: valueFrom resourceFieldRef"),
        ({"name": "T", "valueFrom": {"fieldRef": {"fieldPath": "status.x"}}}, "fieldPath status.x"),
    ],
)
def test_variable_that_cannot_be_had_is_named(env: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PodConfigError, match=complaint):
        resolve_env(POD, {"name": "engine", "env": [env]}, read_config=nothing)


MOUNTS = [Mount("/etc/specserve", Path("/l/outer")), Mount("/etc/specserve/runtime", Path("/l/inner"))]


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("/etc/specserve/runtime/state.json", "/l/inner/state.json"),
        ("/etc/specserve/runtime", "/l/inner"),
        ("/etc/specserve/other", "/l/outer/other"),
        ("--runtime-state=/etc/specserve/runtime/state.json", "--runtime-state=/l/inner/state.json"),
        ("/etc/specserve-other/file", "/etc/specserve-other/file"),
        ("see /etc/specserve/runtime", "see /etc/specserve/runtime"),
        ("A=/etc/specserve", "A=/etc/specserve"),
    ],
)
def test_paths_below_a_mount_point_become_local(text: str, local: str) -> None:
    assert to_local_path(text, MOUNTS) == local


def test_launch_joins_command_and_arguments(tmp_path: Path) -> None:
    container = {
        "name": "engine",
        "command": ["python", "-m", "x"],
        "args": ["--host", "$(POD_IP)", "--state", "/etc/specserve/runtime/state.json"],
        "env": [field("POD_IP", "status.podIP"), {"name": "STATE", "value": "/etc/specserve/runtime"}],
        "workingDir": "/does/not/exist",
    }
    launch = plan_launch(
        POD,
        container,
        mounts=MOUNTS,
        base_env={"PATH": "/bin", "STATE": "overridden"},
        read_config=nothing,
        working_dir=tmp_path,
    )
    assert launch.argv == ("python", "-m", "x", "--host", "127.77.0.5", "--state", "/l/inner/state.json")
    assert launch.env == {"PATH": "/bin", "POD_IP": "127.77.0.5", "STATE": "/l/inner"}
    assert launch.working_dir == tmp_path


def test_container_without_a_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PodConfigError, match="container engine has no command"):
        plan_launch(
            POD,
            {"name": "engine", "args": ["x"]},
            mounts=[],
            base_env={},
            read_config=nothing,
            working_dir=tmp_path,
        )


def test_ports_are_found_by_number_and_name() -> None:
    assert resolve_port(POD, 9) == 9
    assert resolve_port(POD, "http") == 8000
    assert resolve_port(POD, "metrics") is None


def test_containers_do_not_inherit_access_to_a_cluster() -> None:
    inherited = {"PATH": "/bin", "KUBECONFIG": "/home/me/.kube/config", "SPECSERVE_POD_UID": "outer", "HF_HOME": "/hf"}
    env = base_environment(inherited, python_folder=Path("/venv/bin"), reads_pods=False)
    assert env == {"PATH": "/venv/bin:/bin", "HF_HOME": "/hf", "PYTHONUNBUFFERED": "1"}


def test_traffic_between_pods_goes_past_a_proxy() -> None:
    inherited = {"PATH": "/bin", "https_proxy": "http://proxy:3128", "NO_PROXY": "example.org"}
    env = base_environment(inherited, python_folder=Path("/venv/bin"), reads_pods=False)
    assert env["https_proxy"] == "http://proxy:3128"
    assert env["no_proxy"] == env["NO_PROXY"] == "example.org,localhost,127.0.0.0/8"


def test_pod_that_reads_pods_sees_no_proxy() -> None:
    inherited = {"PATH": "/bin", "HTTPS_PROXY": "http://proxy:3128", "all_proxy": "http://proxy:3128"}
    env = base_environment(inherited, python_folder=Path("/venv/bin"), reads_pods=True)
    assert env.keys() == {"PATH", "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("limit", "cpus"),
    [("1", "1"), (4, "4"), ("2500m", "2.5"), ("100m", "0.1"), ("1.5", "1.5"), (".5", "0.5"), ("2e0", "2")],
)
def test_a_cpu_limit_is_told(tmp_path: Path, limit: str | int, cpus: str) -> None:
    container = {"name": "engine", "command": ["true"], "resources": {"limits": {"cpu": limit}}}
    planned = plan_launch(POD, container, mounts=[], base_env={}, read_config=nothing, working_dir=tmp_path)
    assert planned.env == {"SPECSERVE_CPU_LIMIT": cpus}


@pytest.mark.parametrize("limit", ["many", "-1", "0", "2 CPUs", "NaN", "m"])
def test_a_wrong_cpu_limit_is_named(tmp_path: Path, limit: str) -> None:
    container = {"name": "engine", "command": ["true"], "resources": {"limits": {"cpu": limit}}}
    with pytest.raises(PodConfigError, match="resources of container engine is malformed"):
        plan_launch(POD, container, mounts=[], base_env={}, read_config=nothing, working_dir=tmp_path)
