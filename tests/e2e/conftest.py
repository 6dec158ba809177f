"""A running service for end-to-end tests: the commands a user types, and real engines."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "tiny" / "models"
CLI = Path(sys.executable).with_name("specserve")
START_TIMEOUT_SECONDS = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(check: Callable[[], Any], *, timeout_seconds: float, what: str) -> Any:
    """The first true value of `check()`; fails the test with `what` when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_seconds:.0f} s: {what}")
        time.sleep(0.25)


def tiny_manifest(name: str, *, port: int, prefill: int = 1, decode: int = 2) -> dict[str, Any]:
    """The tiny pair in float32, where equal means equal: rounding cannot hide or make a difference."""
    args = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"]
    template = {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "1"}}}]}}
    spec: dict[str, Any] = {
        "model": {"uri": f"file://{MODELS}/target"},
        "engine": {"args": [*args, "--max-num-seqs", "16", "--kv-cache-memory-bytes", "268435456"]},
        "speculation": {
            "draft": {"method": "DraftModel", "uri": f"file://{MODELS}/draft"},
            "length": {"policy": "DSDE", "cap": "Mean", "min": 0, "max": 4},
        },
        "kvTransfer": {"tls": "Disabled", "connectTimeoutMilliseconds": 3000},
        "decode": {"replicas": decode, "drainTimeoutSeconds": 30, "template": template},
        "gateway": {"port": port},
    }
    if prefill:
        spec["prefill"] = {"replicas": prefill, "drainTimeoutSeconds": 30, "template": template}
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": name},
        "spec": spec,
    }


def processes_of(pod_uid: str) -> list[int]:
    """Every process of a pod, by the mark in its environment; engines start several."""
    mark = f"SPECSERVE_POD_UID={pod_uid}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in environment:
            found.append(int(entry.name))
    return found


class LocalService:
    """One `specserve up --wait` and what tests do with it."""

    def __init__(self, folder: Path, name: str, *, prefill: int = 1, decode: int = 2) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.state_dir = folder / "state"
        self.manifest = folder / f"{name}.yaml"
        self.write(tiny_manifest(name, port=self.port, prefill=prefill, decode=decode))

    def write(self, manifest: dict[str, Any]) -> None:
        self.manifest.write_text(yaml.safe_dump(manifest), encoding="utf-8")

    def run(self, *words: str, timeout_seconds: float = 120) -> subprocess.CompletedProcess[str]:
        command = [str(CLI), *words, "--state-dir", str(self.state_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)

    def up(self) -> None:
        timeout = str(START_TIMEOUT_SECONDS)
        done = self.run(
            "up", "-f", str(self.manifest), "--wait", "--timeout", timeout, timeout_seconds=START_TIMEOUT_SECONDS + 60
        )
        assert done.returncode == 0, f"up failed:\n{done.stdout}\n{done.stderr}"

    def down(self) -> None:
        done = self.run("down", timeout_seconds=180)
        assert done.returncode == 0, done.stderr

    def pods(self, pool: str) -> list[dict[str, Any]]:
        """The pods of a pool that are not being deleted."""
        items = json.loads(self.run("get", "pods", "--json").stdout)["items"]
        return [
            pod
            for pod in items
            if pod["metadata"]["labels"]["specserve.dev/pool"] == pool and "deletionTimestamp" not in pod["metadata"]
        ]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.run("get", "spsvc", self.name, "--json").stdout)["status"]
        return status

    def kv_counts(self) -> tuple[int, int]:
        """(transfers, fallbacks) as the status shows them."""
        transfer = self.status().get("kvTransfer", {})
        return transfer.get("transfers", 0), transfer.get("fallbacks", 0)

    def event_reasons(self) -> set[str]:
        items = json.loads(self.run("get", "events", "--json").stdout)["items"]
        return {event["reason"] for event in items}

    def wait_ready(self, timeout_seconds: float = 240) -> None:
        def ready() -> bool:
            conditions = self.status().get("conditions", [])
            return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

        eventually(ready, timeout_seconds=timeout_seconds, what="Ready")

    def wait_restarted(self, pod: dict[str, Any]) -> None:
        """Until a killed pod's container has been started again and the whole service is ready."""
        uid = pod["metadata"]["uid"]

        def restarted() -> bool:
            same = [p for pool in ("prefill", "decode") for p in self.pods(pool) if p["metadata"]["uid"] == uid]
            containers = [c for p in same for c in p["status"].get("containerStatuses", [])]
            return any(c["restartCount"] >= 1 and c["ready"] for c in containers)

        eventually(restarted, timeout_seconds=240, what="the killed pod is ready again")
        self.wait_ready()

    def complete(self, prompt: str, *, max_tokens: int = 32, url: str | None = None) -> str:
        """A greedy completion; fails the test on any other status than 200."""
        body = {"model": self.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        response = httpx.post(f"{url or self.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def kill(self, pod: dict[str, Any], kind: signal.Signals = signal.SIGKILL) -> None:
        """Sends `kind` to all processes of a pod at once, as the kernel's OOM killer or a node's end would."""
        for pid in processes_of(pod["metadata"]["uid"]):
            os.kill(pid, kind)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    """1 gateway, 1 prefill, 2 decode pods, ready. One for all modules: four engines take a minute or two to start."""
    running = LocalService(tmp_path_factory.mktemp("e2e"), "tiny")
    try:
        running.up()
        yield running
    finally:
        running.down()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    lines = (ROOT / "examples" / "tiny" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["prompt"] for row in map(json.loads, lines) if "prompt" in row]
