"""What no pod can run with is refused before anything is started, and shown under a name."""

from typing import Any

import pytest

from specserve_operator.cluster.local.podcheck import check_pod, named_containers
from specserve_operator.cluster.local.podspec import PodConfigError

GOOD: dict[str, Any] = {
    "name": "engine",
    "command": ["python"],
    "args": ["-m", "x"],
    "workingDir": "/work",
    "ports": [{"name": "http", "containerPort": 8000}],
    "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 0.5},
    "livenessProbe": {"exec": {"command": ["true"]}, "failureThreshold": 3},
    "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
}


def pod(*containers: Any, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "spec": {"containers": list(containers), **spec}}


def test_a_well_formed_pod_passes() -> None:
    check_pod(pod(GOOD, {"name": "bare"}, initContainers=[{"name": "init"}], serviceAccountName="reader"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"containers": None}, "containers: must be a list of objects"),
        ({"containers": []}, "containers: there is none"),
        ({"initContainers": {}}, "initContainers: must be a list of objects"),
        ({"initContainers": [{"name": "engine"}]}, "containers[0]: the name engine stands twice"),
        ({"containers": [GOOD, {}]}, "containers[1]: the name is missing"),
        ({"containers": ["engine"]}, "containers[0]: the name is missing"),
        ({"serviceAccountName": 1}, "serviceAccountName: must be a string"),
    ],
)
def test_a_spec_that_names_nothing_to_run_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(PodConfigError) as caught:
        check_pod(pod(GOOD, **spec))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("ports", [{}], ": containerPort is missing"),
        ("ports", [{"containerPort": 0}], " is malformed: containerPort 0 is not in 1-65535"),
        ("readinessProbe", {"httpGet": {}}, ": port is missing"),
        ("startupProbe", {"tcpSocket": {"port": []}}, " is malformed: port []"),
        ("startupProbe", {"exec": {"command": "true"}}, " is malformed: true is not made of strings"),
        ("livenessProbe", {"failureThreshold": -1}, " is malformed: failure_threshold is -1"),
        ("lifecycle", {"preStop": {"sleep": {"seconds": -1}}}, " is malformed: -1 seconds"),
        ("lifecycle", {"preStop": {"sleep": {}}}, ": seconds is missing"),
    ],
)
def test_a_malformed_field_is_named_with_its_container(field: str, value: Any, why: str) -> None:
    with pytest.raises(PodConfigError) as caught:
        check_pod(pod({**GOOD, field: value}))
    assert str(caught.value) == f"{field} of container engine{why}"


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ([GOOD, {"image": "x"}, None, {"name": 1}], ["engine", "containers[1]", "containers[2]", "containers[3]"]),
        ([], ["containers[0]"]),
        ("engine", ["containers[0]"]),
    ],
)
def test_every_container_can_be_shown_whatever_it_lacks(found: Any, names: list[str]) -> None:
    assert [c["name"] for c in named_containers({"spec": {"containers": found}}, "containers")] == names


def test_init_containers_may_be_absent() -> None:
    assert named_containers(pod(GOOD), "initContainers") == []
