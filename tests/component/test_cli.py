"""`specserve` as a user runs it, on the real local cluster and gateway, with pods that have no engine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specserve_operator.cli.client import Client

FAKE_PODS = Path(__file__).parents[1] / "fakes" / "pods"
MANIFEST = """\
apiVersion: specserve.dev/v1alpha1
kind: SpeculativeService
metadata: {{name: tiny}}
spec:
  model: {{uri: "file://./target"}}
  engine: {{args: {args}}}
  speculation:
    draft: {{method: DraftModel, uri: "file://./draft"}}
    length: {{max: 4}}
  kvTransfer: {{tls: Disabled}}
  prefill: {{replicas: 1, drainTimeoutSeconds: 1}}
  decode: {{replicas: 2, drainTimeoutSeconds: 1}}
  gateway: {{port: {port}}}
"""
UP_SECONDS = 90


@dataclass
class Shell:
    """Runs the command line in a folder of its own."""

    folder: Path
    port: int

    def run(self, *args: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "specserve_operator.cli.main", *args],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def ok(self, *args: str, timeout: float = 60.0) -> str:
        result = self.run(*args, timeout=timeout)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def interrupt_up(self, *moments: Callable[[str], bool]) -> tuple[int, str]:
        """`up` in the foreground, with Ctrl-C at the first line that each of `moments` waits for, one after the other.

        Returns the exit code and what was said.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "specserve_operator.cli.main", "up", "-f", "service.yaml"],
            cwd=self.folder,
            env=self.environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        seen = []
        with process.stderr as lines:
            for is_moment in moments:
                for line in lines:
                    seen.append(line)
                    if is_moment(line):
                        process.send_signal(signal.SIGINT)
                        break
            seen += lines.readlines()
        return process.wait(30), "".join(seen)

    def environment(self) -> dict[str, str]:
        paths = [str(FAKE_PODS), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def write_manifest(self, *, args: str = "[]", **replacements: str) -> Path:
        text = MANIFEST.format(port=self.port, args=args)
        for old, new in replacements.items():
            assert old in text
            text = text.replace(old, new)
        path = self.folder / "service.yaml"
        path.write_text(text)
        return path

    @property
    def client(self) -> Client:
        """For what is looked at again and again: a process for each look takes its time."""
        return Client(self.folder / ".specserve")

    def pods(self, pool: str) -> set[str]:
        pods = self.client.list_objects("Pod")
        return {p["metadata"]["name"] for p in pods if p["metadata"]["labels"]["specserve.dev/pool"] == pool}

    def columns(self) -> dict[str, str]:
        (service,) = self.client.list_objects("SpeculativeService")
        return dict(service["status"]["columns"])

    def last_log_line(self, pod: str) -> str:
        return "".join(self.client.log_lines("default", pod, tail_lines=1))

    def processes(self) -> list[int]:
        """Every process that was started for this folder: the control plane, its shims and its pods."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    cwd, state = os.readlink(entry / "cwd"), (entry / "stat").read_text().rpartition(")")[2]
                    environ = (entry / "environ").read_bytes()
                except OSError:
                    continue
                belongs = Path(cwd).is_relative_to(self.folder) or str(self.folder).encode() in environ
                if belongs and state.split()[0] != "Z":
                    found.append(int(entry.name))
        return found


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 10}')
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        shell = Shell(tmp_path, finder.getsockname()[1])
    yield shell
    shell.run("down", "--timeout", "20", timeout=60)
    for pid in shell.processes():
        os.kill(pid, signal.SIGKILL)


def complete(port: int) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(json.load(response)["choices"][0]["text"])


def wait_for(check: object, *, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def test_a_service_lives_from_up_to_down(shell: Shell) -> None:
    shell.write_manifest()
    up = shell.run("up", "-f", "service.yaml", "--wait", "--json", timeout=UP_SECONDS)
    assert up.returncode == 0, up.stderr
    (endpoint,) = json.loads(up.stdout)["services"]
    assert endpoint == {"namespace": "default", "name": "tiny", "endpoint": f"http://127.0.0.1:{shell.port}"}
    assert "service/tiny: Ready=True (AllPoolsReady)" in up.stderr
    assert (shell.folder / ".specserve" / "api.sock").stat().st_mode & 0o777 == 0o600

    # What was measured reaches the columns.
    assert {complete(shell.port) for _ in range(4)} == {f"from {name}" for name in shell.pods("decode")}
    wait_for(lambda: shell.columns()["acceptance"] == "75%", seconds=15)
    header, row = shell.ok("get").splitlines()
    assert header.split()[:5] == ["NAME", "READY", "PREFILL", "DECODE", "TRAIN"]
    assert row.split()[:4] == ["tiny", "True", "1/1", "2/2"]
    described = shell.ok("describe", "tiny")
    assert re.search(r"Acceptance: +75%", described)
    assert re.search(r"Normal +ServiceReady", described)
    assert json.loads(shell.ok("get", "spsvc", "tiny", "--json"))["status"]["observedGeneration"] == 1
    assert shell.ok("get", "pods").count(" Running ") == 4

    # Settings reach running pods without a restart.
    before = shell.pods("decode")
    never = shell.write_manifest(**{"speculation:": "speculation:\n    mode: Never"})
    assert shell.ok("apply", "-f", str(never)) == "speculativeservice/tiny configured\n"
    wait_for(lambda: all("LENGTH_POLICY_OFF" in shell.last_log_line(pod) for pod in before), seconds=15)
    assert shell.pods("decode") == before
    assert shell.ok("apply", "-f", str(never)) == "speculativeservice/tiny unchanged\n"

    assert shell.ok("scale", "tiny", "decode=1") == "speculativeservice/tiny scaled\n"
    wait_for(lambda: len(shell.pods("decode")) == 1)
    (pod,) = shell.pods("decode")
    (line,) = shell.ok("logs", "decode", "--tail", "1", "--json").splitlines()
    assert json.loads(line) == {"pod": pod, "line": "speculation set to LENGTH_POLICY_OFF"}

    # Refusals say why.
    for args, code, message in (
        (("scale", "tiny", "training=1"), 2, "training is no pool that can be scaled"),
        (("logs", pod, "--previous"), 1, "has no earlier run"),
    ):
        refused = shell.run(*args)
        assert (refused.returncode, message in refused.stderr) == (code, True), refused.stderr

    assert shell.ok("down", timeout=60) == "stopped\n"
    assert shell.processes() == []
    assert not shell.client.is_running()


def test_a_killed_control_plane_leaves_nothing_and_a_second_up_works(shell: Shell) -> None:
    shell.write_manifest(**{"replicas: 2": "replicas: 1", "  prefill: {replicas: 1, drainTimeoutSeconds: 1}\n": ""})
    shell.ok("up", "-f", "service.yaml", "--wait", timeout=UP_SECONDS)
    assert len(shell.processes()) >= 3
    os.kill(int(shell.client.info()["pid"]), signal.SIGKILL)
    wait_for(lambda: shell.processes() == [], seconds=15)
    assert not shell.client.is_running()
    shell.ok("up", "-f", "service.yaml", "--wait", timeout=UP_SECONDS)
    assert complete(shell.port).startswith("from tiny-decode-")
    assert shell.ok("delete", "tiny", timeout=60) == "speculativeservice/tiny deleted\n"
    assert shell.client.list_objects("SpeculativeService") == []
    assert shell.client.list_objects("Pod") == []


def test_pods_that_cannot_start_end_up_with_their_log_and_leave_nothing(shell: Shell) -> None:
    shell.write_manifest(args='["--fake-crash"]')
    result = shell.run("up", "-f", "service.yaml", "--wait", timeout=UP_SECONDS)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "error: service tiny failed: " in result.stderr
    assert "fake engine: the weights cannot be read" in result.stderr.partition("last lines of pod tiny-")[2]
    assert "Traceback" not in result.stderr
    assert shell.processes() == []


def test_time_running_out_names_what_is_not_ready_and_leaves_nothing(shell: Shell) -> None:
    shell.write_manifest()
    result = shell.run("up", "-f", "service.yaml", "--wait", "--timeout", "1", timeout=UP_SECONDS)
    assert result.returncode == 1
    assert re.search(r"error: service tiny is not ready after 1 s: \w+Ready is false", result.stderr)
    assert shell.processes() == []


def is_decode_ready(line: str) -> bool:
    return ": Ready" in line and "decode" in line


def test_ctrl_c_in_the_foreground_ends_everything_in_order(shell: Shell) -> None:
    shell.write_manifest()
    exit_code, text = shell.interrupt_up(is_decode_ready)
    assert exit_code == 0
    assert "stopping: pods have 30 s to finish their requests" in text
    assert text.endswith("stopped\n")
    assert "Traceback" not in text
    assert shell.processes() == []


def test_a_second_ctrl_c_kills_all_pods(shell: Shell) -> None:
    shell.write_manifest()
    exit_code, text = shell.interrupt_up(is_decode_ready, lambda line: line.startswith("stopping:"))
    assert exit_code == 130
    assert "killing all pods" in text
    assert text.endswith("ended by force\n")
    assert "Traceback" not in text
    assert shell.processes() == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replicas: 2", "replicas: 2, scaling: {maxReplicas: 2}", "spec.decode: replicas and scaling"),
        ("gateway:", "gatway:", "spec.gatway: unknown field (did you mean gateway?)"),
        ("replicas: 2", "replicas: two", "spec.decode.replicas:"),
        ("./target", "./nothing", "spec.model.uri: there is no folder"),
    ],
)
def test_a_bad_manifest_is_one_clear_error_before_anything_starts(
    shell: Shell, old: str, new: str, message: str
) -> None:
    shell.write_manifest(**{old: new})
    result = shell.run("up", "-f", "service.yaml", "--wait")
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("error:") == 1
    assert not (shell.folder / ".specserve").exists()


def test_a_port_in_use_is_refused_before_anything_starts(shell: Shell) -> None:
    shell.write_manifest()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", shell.port))
        listener.listen()
        result = shell.run("up", "-f", "service.yaml", "--wait")
    assert result.returncode == 2
    assert f"spec.gateway.port: port {shell.port} of 127.0.0.1 is in use" in result.stderr
    assert not (shell.folder / ".specserve").exists()
