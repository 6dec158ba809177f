"""The stop hook of serving pods: real workers over a stand-in for the engine, and the program that the hook runs."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import ROOT
from tests.fakes.engine.process import FakePod
from tests.fakes.waiting import wait_until

HOOK = [sys.executable, "-m", "specserve_workers.drain"]


def start_hook(folder: Path) -> "subprocess.Popen[str]":
    environ = os.environ | {"SPECSERVE_RUN_DIR": str(folder)}
    return subprocess.Popen(HOOK, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_hook(folder: Path) -> tuple[int, str]:
    """Exit code and what it says."""
    hook = start_hook(folder)
    said, _ = hook.communicate(timeout=30)
    return hook.returncode, said


class Request:
    """One that runs in a thread."""

    def __init__(self, pod: FakePod, tokens: int) -> None:
        self._pod, self._tokens = pod, tokens
        self.answer: tuple[int, Any] = (0, None)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: pod.stats().requests.running == 1)

    def _run(self) -> None:
        body = {"model": "fake", "prompt": "x", "max_tokens": self._tokens}
        status, raw = self._pod.post("/v1/completions", body)
        self.answer = status, json.loads(raw) if status else None

    def end(self) -> tuple[int, Any]:
        self._thread.join(20)
        return self.answer


def test_the_hook_waits_for_running_requests_and_the_signal_after_it_for_nothing(tmp_path: Path) -> None:
    with FakePod("decode", tmp_path, behaviour={"time_per_output_token_ms": 30}) as pod:
        request = Request(pod, 40)
        hook = start_hook(pod.run_dir)
        wait_until(lambda: pod.get("/ready")[0] == 503)
        assert pod.post("/v1/completions", {"model": "fake", "prompt": "x"})[0] == 503
        status, answer = request.end()
        assert (status, len(answer["choices"][0]["text"].split())) == (200, 40)
        assert json.loads(hook.communicate(timeout=30)[0]) == {"drained": True, "running": 0}
        assert hook.returncode == 0
        assert pod.get("/health")[0] == 200
        assert run_hook(pod.run_dir)[0] == 0
        pod.terminate()
        assert pod.wait_ended() == 0
        assert not list(pod.run_dir.iterdir())


def test_the_time_is_counted_once_from_the_start_of_draining(tmp_path: Path) -> None:
    """The signal that follows a hook whose time is up cuts at once what the next second would have ended."""
    flags = ("--drain-timeout-seconds", "2")
    with FakePod("decode", tmp_path, flags=flags, behaviour={"time_per_output_token_ms": 35}) as pod:
        request = Request(pod, 100)
        code, said = run_hook(pod.run_dir)
        assert (code, json.loads(said)) == (0, {"drained": False, "running": 1})
        pod.terminate()
        status, answer = request.end()
        assert (status, answer["error"]["code"]) == (503, 503)
        assert pod.wait_ended() == 0


def test_draining_goes_on_without_the_hook(tmp_path: Path) -> None:
    with FakePod("decode", tmp_path, behaviour={"time_per_output_token_ms": 30}) as pod:
        request = Request(pod, 40)
        hook = start_hook(pod.run_dir)
        wait_until(lambda: pod.get("/ready")[0] == 503)
        hook.kill()
        hook.communicate()
        assert request.end()[0] == 200
        assert json.loads(run_hook(pod.run_dir)[1]) == {"drained": True, "running": 0}


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT"])
def test_no_request_over_the_network_drains_a_pod(tmp_path: Path, method: str) -> None:
    with FakePod("decode", tmp_path) as pod:
        body = b"{}" if method == "POST" else None
        assert pod.request(method, "/drain", body=body)[0] in (404, 405)
        assert pod.get("/ready")[0] == 200
        assert not pod.stats().draining


def test_the_socket_is_the_pods_own_at_a_path_of_any_length(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30) / "run"
    with FakePod("prefill", tmp_path, environ={"SPECSERVE_RUN_DIR": str(folder)}):
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "drain.sock")]
        assert modes == [0o700, 0o600]
        assert json.loads(run_hook(folder)[1]) == {"drained": True, "running": 0}


def test_where_nothing_serves_there_is_nothing_to_drain(tmp_path: Path) -> None:
    nothing = (0, "nothing serves in this pod: there is nothing to drain\n")
    assert run_hook(tmp_path / "none") == nothing
    with FakePod("decode", tmp_path) as pod:
        pod.kill()
        assert (pod.run_dir / "drain.sock").is_socket()
        assert run_hook(pod.run_dir) == nothing
        pod.start()
        pod.wait_ready()
        assert json.loads(run_hook(pod.run_dir)[1]) == {"drained": True, "running": 0}


def test_a_pod_that_dies_while_it_drains_fails_the_hook(tmp_path: Path) -> None:
    with FakePod("decode", tmp_path, behaviour={"time_per_output_token_ms": 30}) as pod:
        request = Request(pod, 300)
        hook = start_hook(pod.run_dir)
        wait_until(lambda: pod.get("/ready")[0] == 503)
        pod.kill()
        assert hook.communicate(timeout=30)[0] == "the pod ended before it was drained\n"
        assert hook.returncode == 1
        request.end()


def test_a_pod_whose_socket_cannot_be_made_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.touch()
    pod = FakePod("decode", tmp_path, environ={"SPECSERVE_RUN_DIR": str(folder)})
    pod.start()
    assert pod.wait_ended() == 1
    line = f"error: {folder}/drain.sock: the stop hook's socket cannot be made: File exists"
    assert pod.log.splitlines()[-1] == line


def test_the_hook_loads_nothing_but_the_standard_library() -> None:
    code = "import json, sys, specserve_workers.drain; print(json.dumps(list(sys.modules)))"
    environ = {"PYTHONPATH": str(ROOT / "workers")}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, check=True)
    own = {name for name in json.loads(done.stdout) if name.partition(".")[0] not in sys.stdlib_module_names}
    assert own == {"__main__", "specserve_workers", "specserve_workers.drain"}
