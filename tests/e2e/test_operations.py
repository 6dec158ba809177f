"""Operating a running service: bad requests, bad manifests, run-time changes, scaling, leaving nothing behind."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from specserve_operator.cluster.local import StateDir
from tests.e2e.conftest import LocalService, eventually, processes_of, tiny_manifest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def post(url: str, body: str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ('{"model": "nobody", "prompt": "x"}', 404, "nobody"),
        ('{"model": "tiny", "prompt": "%s"}' % ("word " * 4000), 400, "2048"),
        ('{"model": "tiny", "prompt": "x", "kv_transfer_params": {"lease": "00"}}', 400, "kv_transfer_params"),
    ],
    ids=["unknown model", "too long prompt", "own kv_transfer_params"],
)
def test_bad_request_gets_the_openai_error_body(service: LocalService, body: str, status: int, words: str) -> None:
    response = post(service.url, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["type"]
    assert "Traceback" not in response.text


def test_invalid_json_is_refused(service: LocalService) -> None:
    body = '{"model": "tiny", "prompt": '
    pod = service.pods("decode")[0]
    assert post(f"http://{pod['status']['podIP']}:8000", body).json()["error"]["message"]
    # The gateway reads a body before it has chosen a pod and words its refusal by itself.
    refused = post(service.url, body)
    assert refused.status_code == 400
    assert "JSON" in refused.text


def test_policy_changes_without_a_restart(service: LocalService, prompts: list[str]) -> None:
    before = {pod["metadata"]["uid"] for pod in service.pods("decode")}
    text = service.complete(prompts[0])
    manifest = tiny_manifest(service.name, port=service.port)
    manifest["spec"]["speculation"]["mode"] = "Never"
    service.write(manifest)
    assert service.run("apply", "-f", str(service.manifest)).returncode == 0
    eventually(
        lambda: service.status().get("speculation", {}).get("state") == "Off",
        timeout_seconds=30,
        what="speculation off",
    )
    assert service.complete(prompts[0]) == text
    assert {pod["metadata"]["uid"] for pod in service.pods("decode")} == before


def test_scale_adds_a_pod_that_serves(service: LocalService, prompts: list[str]) -> None:
    assert service.run("scale", service.name, "decode=1").returncode == 0
    eventually(lambda: len(service.pods("decode")) == 1, timeout_seconds=120, what="one decode pod")
    service.wait_ready()
    assert service.complete(prompts[1])


def test_describe_shows_what_a_user_needs(service: LocalService) -> None:
    shown = service.run("describe", service.name).stdout
    for words in ("Name:", service.name, "Conditions:", "Ready", "prefill", "decode", "Events:", service.url):
        assert words in shown


def test_second_up_on_a_running_service_changes_nothing(service: LocalService) -> None:
    service.write(tiny_manifest(service.name, port=service.port))
    service.up()
    pid = StateDir(service.state_dir).control_plane_pid()
    uids = {pod["metadata"]["uid"] for pod in service.pods("decode")}
    service.up()
    assert StateDir(service.state_dir).control_plane_pid() == pid
    assert {pod["metadata"]["uid"] for pod in service.pods("decode")} == uids


def test_killed_control_plane_leaves_no_process_and_up_works_again(service: LocalService, prompts: list[str]) -> None:
    uids = [pod["metadata"]["uid"] for pool in ("gateway", "prefill", "decode") for pod in service.pods(pool)]
    pid = StateDir(service.state_dir).control_plane_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: not any(processes_of(uid) for uid in uids), timeout_seconds=60, what="no process of the service left"
    )
    service.up()
    assert service.complete(prompts[0])


def test_down_leaves_no_process_and_may_be_repeated(service: LocalService) -> None:
    uids = [pod["metadata"]["uid"] for pool in ("gateway", "prefill", "decode") for pod in service.pods(pool)]
    service.down()
    assert not any(processes_of(uid) for uid in uids)
    service.down()


def test_bad_manifest_starts_nothing(tmp_path: Path) -> None:
    service = LocalService(tmp_path, "wrong")
    manifest = tiny_manifest("wrong", port=service.port)
    manifest["spec"]["model"]["uri"] = "file:///no/such/model"
    service.write(manifest)
    done = service.run("up", "-f", str(service.manifest), "--wait")
    assert done.returncode != 0
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr
    assert service.run("get", "pods", "--json").returncode != 0, "no control plane runs"
