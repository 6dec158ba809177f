"""The control plane that the other tests of this folder stand on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jwt
import psutil
import pytest

from hack.kube.control_plane import ControlPlane
from hack.kube.errors import ComponentFailedError, KubectlError
from hack.kube.waiting import wait_until


def deployment(name: str, replicas: int) -> str:
    labels = {"app": name}
    pod = {"containers": [{"name": "main", "image": "localhost/none:1"}]}
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return json.dumps({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec})


def config_map(name: str, owner: dict[str, str]) -> str:
    metadata = {"name": name, "ownerReferences": [owner]}
    return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


def test_user_may_do_what_roles_grant_and_nothing_else(control_plane: ControlPlane, namespace: str) -> None:
    jane = control_plane.kubeconfig_for("jane", ["readers"])
    with pytest.raises(KubectlError, match='User "jane" cannot list resource "configmaps"'):
        control_plane.kubectl("get", "configmaps", "-n", namespace, kubeconfig=jane)

    control_plane.kubectl("create", "role", "read", "--verb=list", "--resource=configmaps", "-n", namespace)
    control_plane.kubectl("create", "rolebinding", "read", "--role=read", "--group=readers", "-n", namespace)
    control_plane.kubectl("create", "configmap", "mine", "-n", namespace)

    listed = control_plane.kubectl("get", "configmaps", "-n", namespace, "-o", "name", kubeconfig=jane)
    assert "configmap/mine" in listed
    with pytest.raises(KubectlError, match="cannot delete"):
        control_plane.kubectl("delete", "configmap", "mine", "-n", namespace, kubeconfig=jane)


def test_audit_events_say_who_asked_for_what_and_the_answer(control_plane: ControlPlane, namespace: str) -> None:
    auditor = control_plane.kubeconfig_for("audited")
    with pytest.raises(KubectlError):
        control_plane.kubectl("delete", "secret", "key", "-n", namespace, kubeconfig=auditor)

    events = [event for event in control_plane.audit_events() if event.user == "audited" and event.resource]
    assert [(e.verb, e.resource, e.namespace, e.name, e.code) for e in events] == [
        ("delete", "secrets", namespace, "key", 403)
    ]
    assert events[0].user_agent.startswith("kubectl/")


def test_a_watch_is_in_the_audit_log_while_it_is_open(control_plane: ControlPlane, namespace: str) -> None:
    def watches() -> list[tuple[str, int]]:
        events = control_plane.audit_events()
        return [(e.resource, e.code) for e in events if e.verb == "watch" and e.namespace == namespace]

    command = control_plane.kubectl_command("get", "--raw", f"/api/v1/namespaces/{namespace}/configmaps?watch=1")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: watches() == [("configmaps", 200)], timeout_seconds=20, what="the watch is logged")
        finally:
            process.kill()


def test_service_account_tokens_verify_against_the_published_keys(control_plane: ControlPlane, namespace: str) -> None:
    token = control_plane.kubectl("create", "token", "default", "-n", namespace, "--audience=specserve").strip()
    configuration = json.loads(control_plane.kubectl("get", "--raw", "/.well-known/openid-configuration"))
    assert configuration["jwks_uri"] == f"{control_plane.server}/openid/v1/jwks"

    keys = jwt.PyJWKSet.from_json(control_plane.kubectl("get", "--raw", "/openid/v1/jwks"))
    key = keys[jwt.get_unverified_header(token)["kid"]]
    claims = jwt.decode(token, key, algorithms=["RS256"], audience="specserve", issuer=configuration["issuer"])
    assert claims["sub"] == f"system:serviceaccount:{namespace}:default"


def test_deployment_makes_pods_and_its_deletion_removes_them(control_plane: ControlPlane, namespace: str) -> None:
    def pods() -> list[str]:
        return control_plane.kubectl("get", "pods", "-n", namespace, "-o", "name").split()

    control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=deployment("two", 2))
    wait_until(lambda: len(pods()) == 2, timeout_seconds=30, what="two pods")
    control_plane.kubectl("delete", "deployment", "two", "-n", namespace)
    wait_until(lambda: not pods(), timeout_seconds=30, what="no pods")


def test_object_owned_by_a_custom_resource_goes_with_it(control_plane: ControlPlane, namespace: str) -> None:
    kind = "speculativeservices.specserve.dev"
    identity = {"apiVersion": "specserve.dev/v1alpha1", "kind": "SpeculativeService"}
    service: dict[str, object] = identity | {"metadata": {"name": "owner"}, "spec": {"model": {"uri": "file:///model"}}}
    control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(service))
    uid = control_plane.kubectl("get", kind, "owner", "-n", namespace, "-o", "jsonpath={.metadata.uid}")
    owned = config_map("owned", owner=identity | {"name": "owner", "uid": uid})
    control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=owned)

    control_plane.kubectl("delete", kind, "owner", "-n", namespace)
    wait_until(
        lambda: "owned" not in control_plane.kubectl("get", "configmaps", "-n", namespace, "-o", "name"),
        timeout_seconds=30,
        what="the owned object is gone",
    )


def test_api_server_comes_back_at_its_address_with_all_data(own_control_plane: ControlPlane) -> None:
    own_control_plane.kubectl("create", "configmap", "kept", "--from-literal=a=1")
    own_control_plane.stop_apiserver()
    with pytest.raises(KubectlError, match="refused"):
        own_control_plane.kubectl("get", "configmap", "kept")

    own_control_plane.start_apiserver()
    assert own_control_plane.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "1"


def test_data_outlive_the_whole_control_plane(tmp_path: Path) -> None:
    with ControlPlane(tmp_path) as first:
        first.kubectl("create", "configmap", "kept")
    with ControlPlane(tmp_path) as second:
        assert second.server == first.server
        assert second.kubectl("get", "configmap", "kept", "-o", "name") == "configmap/kept\n"


def test_requests_hang_while_the_store_is_paused_and_work_again_later(own_control_plane: ControlPlane) -> None:
    own_control_plane.pause_etcd()
    with pytest.raises(KubectlError, match=r"(?i)time"):
        own_control_plane.kubectl("create", "configmap", "late", "--request-timeout=2s")
    own_control_plane.resume_etcd()
    wait_until(own_control_plane.is_ready, timeout_seconds=30, what="the API server is ready again")
    assert own_control_plane.kubectl("create", "configmap", "later", "-o", "name") == "configmap/later\n"


def test_two_control_planes_know_nothing_of_each_other(
    control_plane: ControlPlane, own_control_plane: ControlPlane
) -> None:
    assert control_plane.server != own_control_plane.server
    own_control_plane.kubectl("create", "namespace", "mine-alone")
    with pytest.raises(KubectlError, match="not found"):
        control_plane.kubectl("get", "namespace", "mine-alone")


def test_nothing_stays_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from hack.kube.control_plane import ControlPlane
with ControlPlane(Path(sys.argv[1])) as started:
    print(*started.pids().values(), flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    ) as owner:
        assert owner.stdout is not None
        components = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(components) == 2
        owner.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(components, timeout=10)
    assert alive == []


def test_start_fails_with_the_log_when_a_component_ends(tmp_path: Path) -> None:
    (tmp_path / "etcd").write_text("a file where the store wants its folder")
    with pytest.raises(ComponentFailedError, match=r"etcd has ended(.|\n)*not a directory"), ControlPlane(tmp_path):
        pass
