"""The operator's pods: how they are started, secured and named."""

from typing import Any

import pytest
import typer

from specserve_operator.__main__ import main
from specserve_operator.render.isolation import OPERATOR_APP
from tests.chart.cases import CASES
from tests.chart.rendering import Manifest, Release, of_kind, only, operator_container, operator_pod, render


def _flags(values: dict[str, Any], *, namespace: str = "llm-system") -> dict[str, Any]:
    """What the operator's own command line makes of the arguments that it is given."""
    container = operator_container(render(Release(values, namespace=namespace)))
    assert container["command"] == ["python", "-m", "specserve_operator"]
    program = typer.Typer()
    program.command()(main)
    parsed: dict[str, Any] = typer.main.get_command(program).make_context("operator", container["args"]).params
    return parsed


def test_the_operator_takes_every_flag_that_it_is_given() -> None:
    flags = _flags({})
    expected = {
        "default_engine_image": "specserve-worker:0.1.0",
        "gateway_image": "specserve-worker:0.1.0",
        "health_port": 8080,
        "metrics_port": 9090,
        "identity_port": 9443,
        "identity_secret": "specserve-operator-identity",
        "identity_service": "specserve-operator.llm-system.svc",
        "certificate_lifetime_seconds": 86400,
        "network_policies": True,
        "leader_election": False,
        "log_format": "json",
        "log_level": "info",
    }
    assert {name: flags[name] for name in expected} == expected
    assert list(flags["watch_namespace"] or ()) == []


def test_watched_namespaces_become_flags() -> None:
    assert list(_flags({"watch": {"namespaces": ["team-a", "team-b"]}})["watch_namespace"]) == ["team-a", "team-b"]


def test_leader_election_names_its_lease_after_the_release() -> None:
    flags = _flags({"leaderElection": {"enabled": True}, "fullnameOverride": "ours"})
    assert (flags["leader_election"], flags["leader_election_lease"]) == (True, "ours-operator")


def test_policies_of_services_can_be_switched_off() -> None:
    assert _flags({"networkPolicy": {"services": False}})["network_policies"] is False


def test_more_flags_come_last_and_win() -> None:
    assert _flags({"extraArgs": ["--log-level=error"]})["log_level"] == "error"


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ({}, "specserve-operator:0.1.0"),
        ({"imageRegistry": "r.example.com/llm"}, "r.example.com/llm/specserve-operator:0.1.0"),
        ({"imageRegistry": "r.example.com:5000/", "image": {"tag": "2"}}, "r.example.com:5000/specserve-operator:2"),
        (
            {"image": {"repository": "r.example.com/op", "tag": "2", "digest": f"sha256:{'a' * 64}"}},
            f"r.example.com/op@sha256:{'a' * 64}",
        ),
    ],
)
def test_image_reference(values: dict[str, Any], image: str) -> None:
    objects = render(Release(values))
    assert operator_container(objects)["image"] == image
    assert only(objects, "Pod")["spec"]["containers"][0]["image"] == image


@pytest.mark.parametrize(
    ("gateway", "image"),
    [
        ({}, "r/engine:7"),
        ({"repository": "gateway"}, "r/gateway:0.1.0"),
        ({"repository": "gateway", "tag": "3"}, "r/gateway:3"),
    ],
)
def test_gateways_run_the_engines_image_unless_they_have_their_own(gateway: dict[str, str], image: str) -> None:
    engine = {"image": {"repository": "engine", "tag": "7"}}
    flags = _flags({"imageRegistry": "r", "engine": engine, "gateway": {"image": gateway}})
    assert (flags["default_engine_image"], flags["gateway_image"]) == ("r/engine:7", image)


def _pods(objects: list[Manifest]) -> list[Manifest]:
    return [operator_pod(objects)["spec"], *(pod["spec"] for pod in of_kind(objects, "Pod"))]


@pytest.mark.parametrize("name", CASES)
def test_pods_satisfy_the_restricted_pod_security_standard(name: str) -> None:
    pods = _pods(render(CASES[name]))
    assert len(pods) == 2
    for pod in pods:
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"} & set(pod)
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not [port for port in container.get("ports", ()) if "hostPort" in port]
        assert all(set(volume) <= {"name", "emptyDir", "configMap"} for volume in pod.get("volumes", ()))


def test_only_the_operator_gets_a_token() -> None:
    objects = render(Release())
    assert only(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    assert operator_pod(objects)["spec"]["automountServiceAccountToken"] is True
    assert only(objects, "Pod")["spec"]["automountServiceAccountToken"] is False


def test_services_in_the_namespace_do_not_become_settings() -> None:
    # A Service `specserve-health` would set SPECSERVE_HEALTH_PORT in every pod beside it.
    assert operator_pod(render(Release()))["spec"]["enableServiceLinks"] is False


def test_the_pod_is_told_who_it_is() -> None:
    env = operator_container(render(Release()))["env"]
    told = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in env if "valueFrom" in e}
    assert told == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_IP": "status.podIP"}
    assert {e["name"]: e["value"] for e in env if "value" in e} == {"MALLOC_ARENA_MAX": "2"}


def test_probes_ask_the_health_port() -> None:
    container = operator_container(render(Release()))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"health": 8080, "metrics": 9090, "identity": 9443}
    asked = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert asked == {
        "startupProbe": {"path": "/healthz", "port": "health"},
        "livenessProbe": {"path": "/healthz", "port": "health"},
        "readinessProbe": {"path": "/readyz", "port": "health"},
    }


def test_an_operator_without_election_ends_before_the_next_one_starts() -> None:
    assert only(render(Release()), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    elected = render(Release({"leaderElection": {"enabled": True}}))
    assert only(elected, "Deployment")["spec"]["strategy"]["type"] == "RollingUpdate"


@pytest.mark.parametrize(("replicas", "budgets"), [(0, 0), (1, 0), (2, 1)])
def test_a_disruption_budget_is_made_for_more_than_one_replica(replicas: int, budgets: int) -> None:
    values: dict[str, Any] = {"replicas": replicas, "leaderElection": {"enabled": True}}
    assert len(of_kind(render(Release(values)), "PodDisruptionBudget")) == budgets
    assert not of_kind(render(Release(values | {"pdb": {"enabled": False}})), "PodDisruptionBudget")


@pytest.mark.parametrize("name", CASES)
def test_selectors_find_the_operators_pods_and_no_others(name: str) -> None:
    objects = render(CASES[name])
    labels = operator_pod(objects)["metadata"]["labels"]
    deployment, service = only(objects, "Deployment"), only(objects, "Service")
    for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
        assert not selector.items() <= only(objects, "Pod")["metadata"]["labels"].items()
    # The NetworkPolicies of services let in what has this label.
    assert labels["app.kubernetes.io/name"] == OPERATOR_APP


def test_labels_of_the_user_do_not_replace_those_that_selectors_need() -> None:
    labels = {"app.kubernetes.io/name": "mine", "team": "search"}
    found = operator_pod(render(Release({"podLabels": labels})))["metadata"]["labels"]
    assert (found["app.kubernetes.io/name"], found["team"]) == ("specserve-operator", "search")


def test_an_upgrade_of_the_chart_alone_does_not_restart_the_operator() -> None:
    assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(
        operator_pod(render(Release()))["metadata"]["labels"]
    )
