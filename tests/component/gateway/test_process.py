"""The gateway as a process of its own, with a stand-in for the router's program in PATH."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

HOST = "127.0.0.1"
# Says how it was started, and answers by the path: /v1/slow waits for the file `go`, /v1/die ends it at once.
ROUTER = f"""#!{sys.executable} -S
import http.server, json, os, signal, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/v1/die":
            print("about to die", flush=True)
            os._exit(7)
        if self.path == "/v1/slow":
            open("slow", "w").close()
            while not os.path.exists("go"):
                time.sleep(0.01)
        body = json.dumps({{"argv": sys.argv[1:], "pid": os.getpid()}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
def stop(number, _):
    open(f"signal-{{number}}", "w").close()
    threading.Thread(target=server.shutdown).start()
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler)
server.daemon_threads = False
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
open("up", "w").close()
server.serve_forever()
server.server_close()
"""


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in time: {value!r}"
        time.sleep(0.01)
    return value


class GatewayProcess:
    """A gateway in `folder`, where its router works too."""

    def __init__(self, folder: Path, *flags: str, has_router: bool = True) -> None:
        self.folder = folder
        program = folder / "bin" / "vllm-router"
        program.parent.mkdir()
        if has_router:
            program.write_text(ROUTER)
            program.chmod(0o755)
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        own = flags or ("--host", HOST, "--http-port", str(self.port), "--", "--policy", "round_robin")
        command = [sys.executable, "-m", "specserve_workers.gateway", *own]
        environ = os.environ | {"PATH": f"{program.parent}:/usr/bin:/bin", "PYTHONPATH": str(folder)}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environ, stderr=log)

    def wait_up(self) -> None:
        eventually((self.folder / "up").exists)
        eventually(lambda: self.process.poll() is not None or self.get("/liveness"))

    def connect(self) -> "closing[http.client.HTTPConnection]":
        return closing(http.client.HTTPConnection(HOST, self.port, timeout=20))

    def get(self, path: str) -> Any:
        """The answer; None where there is none."""
        with self.connect() as connection:
            try:
                connection.request("GET", path)
                return json.loads(connection.getresponse().read())
            except (OSError, http.client.HTTPException):
                return None

    def end(self) -> tuple[int, str]:
        """Exit code and last line."""
        code = self.process.wait(20)
        return code, (self.folder / "log").read_text().rstrip().rpartition("\n")[2]


@pytest.fixture(params=["uvloop", "asyncio"])
def gateway(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GatewayProcess]:
    if request.param == "asyncio":
        (tmp_path / "uvloop.py").write_text("raise ImportError")
    running = GatewayProcess(tmp_path)
    try:
        running.wait_up()
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_the_router_listens_on_loopback_at_a_port_of_its_own(gateway: GatewayProcess) -> None:
    argv = gateway.get("/v1/models")["argv"]
    assert argv[:5] == ["--policy", "round_robin", "--host", "127.0.0.1", "--port"]
    assert 1024 <= int(argv[5]) != gateway.port
    assert gateway.get("/list_workers")["error"]["code"] == 404
    # Nobody else is given that port meanwhile, although others listen on ports that the system chooses.
    for _ in range(100):
        with socket.create_server((HOST, 0)) as other:
            assert other.getsockname()[1] != int(argv[5])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_with_the_router_which_finishes_what_runs(
    gateway: GatewayProcess, number: signal.Signals
) -> None:
    with gateway.connect() as connection:
        connection.request("GET", "/v1/slow")
        eventually((gateway.folder / "slow").exists)
        gateway.process.send_signal(number)
        eventually((gateway.folder / f"signal-{int(number)}").exists)
        eventually(lambda: gateway.get("/v1/models") is None)
        assert gateway.process.poll() is None
        (gateway.folder / "go").touch()
        assert json.loads(connection.getresponse().read())["argv"][0] == "--policy"
    code, line = gateway.end()
    assert code == 0
    assert line.endswith("vllm-router has ended with exit code 0")


def test_a_router_that_dies_ends_it_with_its_code_and_says_so_last(gateway: GatewayProcess) -> None:
    with gateway.connect() as connection:
        connection.request("GET", "/v1/die")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.read())["error"]["type"] == "ServiceUnavailableError"
    assert gateway.end() == (7, "error: vllm-router ended by itself with exit code 7")


def test_a_router_that_is_killed_is_told_apart_by_its_code(gateway: GatewayProcess) -> None:
    os.kill(gateway.get("/v1/models")["pid"], signal.SIGKILL)
    assert gateway.end() == (137, "error: vllm-router ended by itself with exit code 137")


def test_the_router_does_not_outlive_a_gateway_that_is_killed(gateway: GatewayProcess) -> None:
    router = psutil.Process(gateway.get("/v1/models")["pid"])
    assert router.is_running()
    gateway.process.kill()
    gateway.process.wait()
    router.wait(20)


def test_without_the_routers_program_it_says_so(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, has_router=False)
    assert gateway.end() == (1, "error: vllm-router cannot be started: No such file or directory")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        gateway = GatewayProcess(tmp_path, "--host", HOST, "--http-port", str(port))
        expected = f"error: --http-port {port}: cannot listen on {HOST}:{port}: Address already in use"
        assert gateway.end() == (1, expected)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--http-port", "8000"), "error: the following arguments are required: --host"),
        (("--host", HOST, "--http-port", "0"), "error: argument --http-port: '0' is not a port (1-65535)"),
        (("--host", HOST, "--max-connections", "none"), "error: argument --max-connections: 'none' is not in 1-999999"),
        (("--host", HOST, "--policy", "x"), "error: unrecognized arguments: --policy x"),
        (
            ("--host", HOST, "--", "--port=80"),
            "error: --port=80: the router listens on loopback, on a port that is chosen at start",
        ),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(tmp_path: Path, flags: tuple[str, ...], line: str) -> None:
    assert GatewayProcess(tmp_path, *flags).end() == (2, line)


def test_it_imports_neither_the_engine_nor_what_only_pods_need() -> None:
    code = "import json, sys, specserve_workers.gateway.__main__; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"vllm", "torch", "numpy", "grpc", "aiohttp", "uvicorn", "prometheus_client", "cryptography"}
    assert "httptools" in loaded
