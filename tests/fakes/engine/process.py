"""Starts fake pods as processes and talks to them, for tests that need no cluster."""

import dataclasses
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import grpc

from specserve_protos.v1alpha1 import control_pb2, control_pb2_grpc
from tests.fakes.engine import MODULE_PATH
from tests.fakes.engine.behaviour import VARIABLE
from tests.fakes.waiting import wait_until

HTTP_PORT: Final = 8000
CONTROL_PORT: Final = 9000
START_SECONDS: Final = 30.0
_numbers = itertools.count()


def new_host() -> str:
    """An address of this machine that the last 250 fake pods of this process did not have, nor pods of another."""
    pid = os.getpid()
    return f"127.{100 + pid // 256 % 100}.{pid % 256}.{1 + next(_numbers) % 250}"


@dataclasses.dataclass
class FakePod:
    """One pod's process. `flags` go before the `--` of its command line, `engine_args` behind it.

    `folder` takes its log, its termination log, its run-time state and the addresses of host names. As a context
    manager it is started, ready, and killed at the end.
    """

    pool: str
    folder: Path
    flags: Sequence[str] = ()
    engine_args: Sequence[str] = ()
    behaviour: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "org/model"
    host: str = dataclasses.field(default_factory=new_host)
    name: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The pod's whole command, where it is not to be made here. `python` is this interpreter.
    command: Sequence[str] = ()
    process: "subprocess.Popen[bytes] | None" = None

    def __post_init__(self) -> None:
        self.name = self.name or f"fake-{self.pool}-{self.host.rsplit('.', 1)[1]}"

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    @property
    def termination_log(self) -> Path:
        return self.folder / f"{self.name}.termination"

    @property
    def run_dir(self) -> Path:
        return self.folder / f"{self.name}.run"

    @property
    def runtime_state(self) -> Path:
        return self.folder / "state.json"

    def start(self) -> None:
        command = [sys.executable if word == "python" else word for word in self.command or self._command()]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ(), cwd=self.folder)

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log[-3000:]
            return self.get("/ready")[0] == 200

        wait_until(is_ready, timeout_seconds=START_SECONDS)

    def wait_ended(self, *, timeout_seconds: float = START_SECONDS) -> int:
        """The exit code."""
        assert self.process is not None
        return self.process.wait(timeout_seconds)

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def steer(self, **fields: Any) -> dict[str, Any]:
        """Changes the behaviour; the whole of it as it is then."""
        status, raw = self.post("/fake", fields)
        assert status == 200, raw
        behaviour: dict[str, Any] = json.loads(raw)
        return behaviour

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; status 0 where there is no answer."""
        return self.request("GET", path)

    def post(self, path: str, body: Any, *, timeout_seconds: float = 30) -> tuple[int, bytes]:
        """As `get`."""
        return self.request("POST", path, body=json.dumps(body).encode(), timeout_seconds=timeout_seconds)

    def request(
        self, method: str, path: str, *, body: bytes | None = None, timeout_seconds: float = 10
    ) -> tuple[int, bytes]:
        """As `get`."""
        headers = {"content-type": "application/json"} if body is not None else {}
        url = f"http://{self.host}:{HTTP_PORT}{path}"
        request = urllib.request.Request(url, data=body, headers=headers, method=method)
        return _ask(request, timeout_seconds=timeout_seconds)

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """The answer to a prompt; AssertionError where it is refused."""
        status, raw = self.post("/v1/completions", {"model": "fake", "prompt": prompt, **fields})
        assert status == 200, raw
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def text(self, prompt: str | list[int], **fields: Any) -> str:
        text: str = self.complete(prompt, **fields)["choices"][0]["text"]
        return text

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric with just these labels and any others."""
        for line in self.get("/metrics")[1].decode().splitlines():
            if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def stats(self, *, timeout_seconds: float = 5) -> control_pb2.GetStatsResponse:
        """What `GetStats` says. Raises grpc.RpcError."""
        answer: control_pb2.GetStatsResponse
        answer = self.call("GetStats", control_pb2.GetStatsRequest(), timeout_seconds=timeout_seconds)
        return answer

    def call(self, method: str, request: Any, *, timeout_seconds: float = 5) -> Any:
        """Calls the control service. Raises grpc.RpcError."""
        with grpc.insecure_channel(f"{self.host}:{CONTROL_PORT}") as channel:
            return getattr(control_pb2_grpc.ControlServiceStub(channel), method)(request, timeout=timeout_seconds)

    def _command(self) -> list[str]:
        flags = {
            "--model": self.model,
            "--served-model-name": "fake",
            "--service": "fake",
            "--revision": "r1",
            "--target-revision": "t1",
            "--host": self.host,
            "--runtime-state": str(self.runtime_state),
        }
        words = [word for pair in flags.items() for word in pair]
        return ["python", "-m", f"specserve_workers.{self.pool}", *words, *self.flags, "--", *self.engine_args]

    def _environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": MODULE_PATH,
            "POD_NAME": self.name,
            "POD_UID": f"uid-{self.name}",
            "POD_IP": self.host,
            "SPECSERVE_HOSTS_DIR": str(self.folder),
            "SPECSERVE_RUN_DIR": str(self.run_dir),
            "SPECSERVE_TERMINATION_LOG": str(self.termination_log),
            VARIABLE: json.dumps(dict(self.behaviour)),
            **self.environ,
        }


def _ask(request: urllib.request.Request, *, timeout_seconds: float) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error).encode()
