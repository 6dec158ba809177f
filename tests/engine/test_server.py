"""A prefill and a decode pod as real processes, as the operator starts them: what clients and the operator see.

The prefill pod, asked directly, is the plain engine that answers are compared with: same model, no drafter.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from specserve_protos.v1alpha1 import control_pb2, control_pb2_grpc

MODELS = Path(__file__).parents[2] / "examples" / "tiny" / "models"
PREFILL_HOST, DECODE_HOST = "127.79.0.2", "127.79.0.3"
PREFILL_NAME = "tiny-prefill-t1"
START_SECONDS = 400
PROMPT = (
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n"
    "    def read(self):\n        with open(self.path) as file:\n            return file"
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "count": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
HOOK = [sys.executable, "-m", "specserve_workers.drain"]


@dataclass
class Pod:
    """One pod's process tree, started again by `ensure_running` after a test has killed it."""

    module: str
    host: str
    folder: Path
    flags: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.module}.log"

    @property
    def own_environ(self) -> dict[str, str]:
        return {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "SPECSERVE_HOSTS_DIR": str(self.folder),
            "SPECSERVE_RUN_DIR": str(self.folder / f"{self.module}.run"),
            "POD_NAME": f"tiny-{self.module}-1",
        }

    def start(self) -> None:
        command = [sys.executable, "-m", f"specserve_workers.{self.module}"]
        command += ["--model", str(MODELS / "target"), "--served-model-name", "tiny", "--service", "tiny"]
        command += ["--revision", "r1", "--target-revision", "t1", "--host", self.host, "--kv-lease-seconds", "8"]
        command += ["--runtime-state", str(self.folder / "state.json"), "--drain-timeout-seconds", "60", *self.flags]
        command += ["--", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024", "--dtype", "float32"]
        environ = os.environ | self.own_environ
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environ, start_new_session=True, cwd=self.folder
            )

    def wait_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            if self.get("/ready")[0] == 200:
                return
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def ensure_running(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.start()
            self.wait_ready()

    def kill(self) -> None:
        """Ends the whole tree at once, as a lost node does."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def get(self, path: str) -> tuple[int, bytes]:
        return _http(urllib.request.Request(f"http://{self.host}:8000{path}"))

    def post(self, path: str, body: Any) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return _http(urllib.request.Request(f"http://{self.host}:8000{path}", data=data, headers=headers))

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The answer without what differs between any two: ids, times, the engine's fingerprint."""
        status, raw = self.post(path, {"model": "tiny", "temperature": 0, **body})
        assert status == 200, raw
        if body.get("stream"):
            events = [event.removeprefix("data: ") for event in raw.decode().split("\n\n") if event]
            assert events[-1] == "[DONE]"
            return _stream_text([json.loads(event) for event in events[:-1]])
        answer = json.loads(raw)
        return {key: answer[key] for key in ("choices", "usage")}

    def control(self) -> Any:
        return control_pb2_grpc.ControlServiceStub(grpc.insecure_channel(f"{self.host}:9000"))

    def stats(self) -> control_pb2.GetStatsResponse:
        """Statistics once they have settled: they follow the engine's numbers within a second or so."""
        deadline = time.monotonic() + 30
        before = None
        while True:
            now = self.control().GetStats(control_pb2.GetStatsRequest(), timeout=10)
            now.ClearField("uptime_seconds")
            if now == before or time.monotonic() > deadline:
                return now
            before = now
            time.sleep(2.5)


def _http(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError as error:
        return 0, str(error).encode()


def _stream_text(events: list[dict[str, Any]]) -> Any:
    texts: dict[int, str] = {}
    reasons: dict[int, Any] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    return texts, reasons, usage


@dataclass(frozen=True)
class Service:
    prefill: Pod
    decode: Pod

    def is_answered_alike(self, path: str, body: dict[str, Any]) -> bool:
        expected = self.prefill.ask(path, body)
        return bool(self.decode.ask(path, body) == expected)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("pods")
    (folder / PREFILL_NAME).write_text(PREFILL_HOST + "\n")
    draft = ["--draft-method", "DraftModel", "--draft-model", str(MODELS / "draft"), "--max-draft-tokens", "4"]
    service = Service(
        Pod("prefill", PREFILL_HOST, folder),
        Pod("decode", DECODE_HOST, folder, [*draft, "--prefill-peers", f"{PREFILL_NAME}:8000"]),
    )
    try:
        service.prefill.start()
        service.decode.start()
        yield service
    finally:
        service.decode.kill()
        service.prefill.kill()


@pytest.fixture
def service(pods: Service) -> Service:
    for pod in (pods.prefill, pods.decode):
        if pod.process is not None and pod.process.poll() is None:
            pod.wait_ready()
        pod.ensure_running()
    return pods


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 24}),
    "stream": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "stream": True}),
    "usage": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "token ids": ("/v1/completions", {"prompt": list(range(300, 400)), "max_tokens": 16}),
    "one token": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
    "stop": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 64, "stop": ["\n", "."]}),
    "min tokens": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "min_tokens": 12, "ignore_eos": True}),
    "two prompts": ("/v1/completions", {"prompt": [PROMPT, PROMPT[20:]], "max_tokens": 8}),
    "echo": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "echo": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16}),
    "chat stream": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16, "stream": True},
    ),
    "schema": (
        "/v1/completions",
        {
            "prompt": PROMPT,
            "max_tokens": 48,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_a_plain_engine(service: Service, name: str):
    path, body = REQUESTS[name]
    assert service.is_answered_alike(path, body)


def test_log_probabilities_are_those_of_a_plain_engine(service: Service):
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 2}
    found, expected = (
        pod.ask("/v1/completions", body)["choices"][0]["logprobs"] for pod in (service.decode, service.prefill)
    )
    assert found["tokens"] == expected["tokens"]
    assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)


def test_several_sequences_of_one_prompt_share_one_prefill(service: Service):
    before = service.decode.stats().kv_transfer
    body = {"prompt": "# " + PROMPT, "max_tokens": 8, "n": 2, "seed": 7, "temperature": 0.8}
    answer = service.decode.ask("/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    after = service.decode.stats().kv_transfer
    assert after.remote_prefills - before.remote_prefills == 2
    assert sum(f.count for f in after.fallbacks) == sum(f.count for f in before.fallbacks)


def test_prompts_are_loaded_over_the_network_and_leases_end(service: Service):
    before = service.decode.stats()
    prompts = [f"# case {i}\n" + PROMPT for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        texts = list(
            pool.map(lambda p: service.decode.ask("/v1/completions", {"prompt": p, "max_tokens": 16}), prompts)
        )
    assert texts == [service.prefill.ask("/v1/completions", {"prompt": p, "max_tokens": 16}) for p in prompts]
    after = service.decode.stats()
    assert after.kv_transfer.remote_prefills - before.kv_transfer.remote_prefills == 6
    assert after.kv_transfer.loaded_tokens - before.kv_transfer.loaded_tokens > 6 * 32
    assert after.requests.succeeded - before.requests.succeeded == 6
    assert after.requests.output_tokens - before.requests.output_tokens == sum(
        text["usage"]["completion_tokens"] for text in texts
    )
    producer = service.prefill.stats().kv_transfer
    assert producer.served_transfers >= 6
    assert producer.open_leases == 0


def test_speculation_is_changed_at_run_time(service: Service):
    control = service.decode.control()
    generation = service.decode.stats().speculation.generation

    def drafted() -> dict[int, int]:
        return {entry.policy: entry.drafted_tokens for entry in service.decode.stats().speculation.by_policy}

    settings = control_pb2.SpeculationSettings(policy=1, cap=1, max_tokens=4)
    reply = control.SetSpeculation(
        control_pb2.SetSpeculationRequest(generation=generation + 1, settings=settings), timeout=30
    )
    assert reply.applied
    before = drafted()
    assert service.is_answered_alike(*REQUESTS["completion"])
    assert drafted() == before
    settings = control_pb2.SpeculationSettings(policy=2, cap=1, max_tokens=4, static_tokens=3)
    control.SetSpeculation(control_pb2.SetSpeculationRequest(generation=generation + 2, settings=settings), timeout=30)
    assert service.is_answered_alike(*REQUESTS["completion"])
    assert drafted()[control_pb2.LENGTH_POLICY_STATIC] > before.get(control_pb2.LENGTH_POLICY_STATIC, 0)


def test_the_state_file_is_applied_while_running(service: Service):
    generation = service.decode.stats().speculation.generation + 10
    speculation = {"policy": "DSDE", "cap": "Mean", "minTokens": 1, "maxTokens": 3, "staticTokens": 0}
    path = service.decode.folder / "state.json"
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"version": 1, "generation": generation, "speculation": speculation}))
    temporary.replace(path)
    deadline = time.monotonic() + 30
    while (stats := service.decode.stats().speculation).generation != generation:
        assert time.monotonic() < deadline, stats
    assert (stats.in_force.policy, stats.in_force.max_tokens) == (control_pb2.LENGTH_POLICY_DSDE, 3)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "other", "prompt": PROMPT}, 404, "other"),
        (b'{"model": ', 400, "JSON"),
        ({"model": "tiny", "prompt": list(range(300, 310)) * 200}, 400, "1024"),
        ({"model": "tiny", "prompt": PROMPT, "temperature": "hot"}, 400, "temperature"),
        ({"model": "tiny", "prompt": PROMPT, "kv_transfer_params": {"do_remote_prefill": True}}, 400, "reserved"),
    ],
)
def test_bad_requests_get_the_openai_error_body(service: Service, body: Any, status: int, words: str):
    found, raw = service.decode.post("/v1/completions", body)
    error = json.loads(raw)["error"]
    assert (found, error["code"]) == (status, status)
    assert words in error["message"]
    assert {"message", "type", "param", "code"} <= set(error)


def test_metrics_of_the_engine_and_our_own_are_scraped_together(service: Service):
    service.decode.ask(*REQUESTS["stream"])
    status, raw = service.decode.get("/metrics")
    assert status == 200
    lines = dict(line.rsplit(" ", 1) for line in raw.decode().splitlines() if line and not line.startswith("#"))
    assert float(lines['specserve_worker_requests_total{pool="decode",result="succeeded"}']) >= 1
    assert float(lines['specserve_worker_time_to_first_token_seconds_count{pool="decode"}']) >= 1
    assert any(name.startswith("vllm:generation_tokens_total") for name in lines)


def test_a_lost_prefill_pod_costs_no_request(service: Service):
    path, body = REQUESTS["completion"]
    expected = service.prefill.ask(path, body)
    before = service.decode.stats()
    service.prefill.kill()
    for _ in range(3):
        assert service.decode.ask(path, body) == expected
    after = service.decode.stats()
    assert after.requests.failed == before.requests.failed
    counts = [sum(f.count for f in stats.kv_transfer.fallbacks) for stats in (before, after)]
    assert counts[1] - counts[0] == 3


def test_a_told_pod_finishes_its_streams_refuses_new_requests_and_exits_with_0(service: Service):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(service.decode.post, "/v1/completions", body)
        while service.decode.control().GetStats(control_pb2.GetStatsRequest(), timeout=5).requests.running == 0:
            assert not stream.done()
            time.sleep(0.05)
        assert service.decode.process is not None
        # As the kubelet does it, but that it would wait for the hook before it sends the signal.
        hook = subprocess.Popen(HOOK, env=os.environ | service.decode.own_environ, stdout=subprocess.PIPE)
        while service.decode.get("/ready")[0] == 200:
            assert not stream.done()
        service.decode.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = [service.decode.post("/v1/completions", body)[0] for _ in range(3)]
        ready, alive = service.decode.get("/ready")[0], service.decode.get("/health")[0]
        was_running = not stream.done()
        status, raw = stream.result()
    assert was_running, "the stream was too short to see the drain"
    assert (refused, ready, alive) == ([503] * 3, 503, 200)
    assert status == 200
    assert raw.decode().endswith("data: [DONE]\n\n")
    assert b'"error"' not in raw
    assert json.loads(hook.communicate(timeout=60)[0]) == {"drained": True, "running": 0}
    assert hook.returncode == 0
    assert service.decode.process.wait(60) == 0


def test_a_pod_whose_engine_died_ends_with_a_clear_line(service: Service):
    process = service.decode.process
    assert process is not None
    (engine,) = (child for child in psutil.Process(process.pid).children() if "EngineCore" in " ".join(child.cmdline()))
    engine.kill()
    assert process.wait(60) == 1
    assert service.decode.log.read_text().splitlines()[-1].startswith("error: the engine died: ")


def test_a_pod_told_to_stop_during_its_start_ends_soon(tmp_path: Path):
    pod = Pod("decode", "127.79.0.4", tmp_path)
    try:
        pod.start()
        assert pod.process is not None
        deadline = time.monotonic() + START_SECONDS
        while not any("EngineCore" in " ".join(c.cmdline()) for c in psutil.Process(pod.process.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        pod.process.send_signal(signal.SIGTERM)
        assert pod.process.wait(40) == 143
    finally:
        pod.kill()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nothing"], "--model: there is no folder /nothing"),
        (["--http-port", "8000"], "--http-port 8000: cannot listen"),
        (["--control-port", "9000"], "--control-port 9000: cannot listen"),
    ],
)
def test_a_start_that_cannot_work_ends_with_one_clear_line(
    service: Service, tmp_path: Path, flags: list[str], words: str
):
    command = [sys.executable, "-m", "specserve_workers.decode", "--model", str(MODELS / "target")]
    command += ["--served-model-name", "tiny", "--service", "tiny", "--revision", "r", "--target-revision", "t"]
    command += ["--host", DECODE_HOST, "--http-port", "8001", "--control-port", "9001", *flags]
    log = tmp_path / "termination"
    environ = os.environ | {"SPECSERVE_TERMINATION_LOG": str(log), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"error: {words}")
    assert log.read_text().strip() == ended.stderr.splitlines()[-1]
