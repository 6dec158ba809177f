"""Fake pods are pods: started as the operator starts them, and with answers that do not depend on the pod."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from specserve_operator.constants import LABEL_POOL
from specserve_operator.core.plan import plan
from specserve_operator.identity.names import PodId
from specserve_operator.render import render
from specserve_protos.v1alpha1 import control_pb2 as pb
from tests.component.fake_pod_support import (
    BLOCKS,
    PEERS,
    PROMPT,
    Service,
    fallbacks,
    running_service,
    settled_stats,
    stats_when,
)
from tests.fakes.engine.image import INSTALLED, lay_out
from tests.fakes.engine.process import FakePod
from tests.fakes.waiting import wait_until
from tests.unit.core.builders import disaggregated, make_snapshot
from tests.unit.identity.builders import certified_files, make_authority


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("pods")) as service:
        yield service


@pytest.fixture
def service(shared: Service) -> Service:
    shared.reset()
    return shared


# ---- starting


def rendered_pod(pool: str, folder: Path) -> FakePod:
    """The pod that the operator renders, as a kubelet starts it."""
    engine = {"args": ["--max-model-len", "4096", "--block-size", "16", "--flag-of-a-later-engine"]}
    for obj in render(plan(make_snapshot(disaggregated(engine=engine)))):
        if obj["kind"] == "Deployment" and obj["metadata"]["labels"][LABEL_POOL] == pool:
            container = obj["spec"]["template"]["spec"]["containers"][0]
            pod = FakePod(pool, folder, name=f"{obj['metadata']['name']}-x")
            pod.command = [word.replace("$(POD_IP)", pod.host) for word in container["command"] + container["args"]]
            return pod
    raise AssertionError(pool)


def test_rendered_commands_start_pods_that_serve_together(tmp_path: Path) -> None:
    prefill, decode = rendered_pod("prefill", tmp_path), rendered_pod("decode", tmp_path)
    peers = decode.command[decode.command.index("--prefill-peers") + 1]
    (tmp_path / peers.split(":")[0]).write_text(prefill.host)
    with prefill, decode:
        body = {"model": "coder", "prompt": PROMPT, "max_tokens": 8}
        texts = [json.loads(pod.post("/v1/completions", body)[1])["choices"][0]["text"] for pod in (prefill, decode)]
        stats = stats_when(decode, lambda now: now.kv_transfer.remote_prefills)
    assert texts[0] == texts[1] != ""
    assert (stats.pool, stats.pod_name, stats.pod_uid) == ("decode", decode.name, f"uid-{decode.name}")
    assert stats.revision == decode.command[decode.command.index("--revision") + 1]
    assert stats.speculation.started_max_tokens == 8


def test_pods_load_neither_the_engine_nor_its_libraries(service: Service) -> None:
    for pod in service.pods:
        assert pod.process is not None
        maps = Path(f"/proc/{pod.process.pid}/maps").read_text()
        assert "grpc" in maps
        assert not any(f"/{library}/" in maps for library in ("torch", "numpy", "vllm", "uvloop", "pydantic_core"))


def test_behaviour_of_the_start_comes_from_file_environment_and_engine_arguments(tmp_path: Path) -> None:
    file = tmp_path / "fake.json"
    file.write_text(json.dumps({"error_ratio": 0.5, "acceptance_ratio": 0.1, "decode": {"answer_tokens": 7}}))
    pod = FakePod(
        "decode",
        tmp_path,
        engine_args=("--fake", '{"error_ratio": 0.25}'),
        behaviour={"acceptance_ratio": 0.2, "prefill": {"answer_tokens": 9}},
        environ={"SPECSERVE_FAKE_FILE": str(file)},
    )
    with pod:
        behaviour = json.loads(pod.get("/fake")[1])
    assert {name: behaviour[name] for name in ("error_ratio", "acceptance_ratio", "answer_tokens")} == {
        "error_ratio": 0.25,
        "acceptance_ratio": 0.2,
        "answer_tokens": 7,
    }


def test_image_needs_nothing_of_the_repository(tmp_path: Path) -> None:
    layer = lay_out(tmp_path / "image")
    code = layer / INSTALLED.removeprefix("/")
    sources = [path for path in code.rglob("*.py") if "vllm" not in path.parts]
    assert len(list(code.rglob("__pycache__/*.pyc"))) >= len(sources)
    with FakePod("decode", tmp_path, environ={"PYTHONPATH": str(code)}) as pod:
        assert pod.process is not None
        modules = psutil.Process(pod.process.pid).environ()["PYTHONPATH"]
        assert pod.text(PROMPT, max_tokens=4) != ""
        assert pod.get("/fake")[0] == 200
    assert modules == str(code)
    assert f"ENV PYTHONPATH={INSTALLED}\n" in (tmp_path / "image" / "Dockerfile").read_text()


def test_pods_with_certificates_serve_each_other_over_tls(tmp_path: Path) -> None:
    authority = make_authority()
    names = {"POD_NAMESPACE": "llm"}
    flags = ["--identity-server", "localhost:1", "--identity-token", str(tmp_path / "none")]
    (tmp_path / "ca.pem").write_text(authority.trust_bundle)
    flags += ["--trust-bundle", str(tmp_path / "ca.pem"), "--identity-directory"]
    pods = {}
    for pool, own in (("prefill", []), ("decode", ["--prefill-peers", f"{PEERS}:8443"])):
        directory = tmp_path / f"identity-{pool}"
        pod = FakePod(pool, tmp_path, flags=[*flags, str(directory), *own], engine_args=BLOCKS, environ=names)
        certified_files(directory, PodId("llm", "fake", pool, f"uid-{pod.name}"), authority)
        pods[pool] = pod
    prefill, decode = pods["prefill"], pods["decode"]
    (tmp_path / PEERS).write_text(prefill.host)
    with prefill, decode:
        assert prefill.post("/v1/completions", {"prompt": PROMPT})[0] == 403
        assert len(decode.text(PROMPT, max_tokens=7).split()) == 7
        wait_until(lambda: decode.metric("specserve_worker_kv_loaded_tokens_total") > 0)
        assert prefill.steer(kv_delay_ms=1)["kv_delay_ms"] == 1
        with pytest.raises(grpc.RpcError):
            decode.stats(timeout_seconds=2)


def test_start_that_fails_says_why_in_the_last_line(tmp_path: Path) -> None:
    reason = "--draft-model: TokenizerMismatch: vocab_size is 1"
    pod = FakePod("decode", tmp_path, behaviour={"startup_error": reason})
    pod.start()
    assert pod.wait_ended() == 1
    assert pod.log.splitlines()[-1] == f"error: {reason}"
    assert pod.termination_log.read_text() == f"error: {reason}\n"


def test_pod_that_is_told_to_stop_while_it_starts_ends_at_once(tmp_path: Path) -> None:
    pod = FakePod("decode", tmp_path, behaviour={"startup_seconds": 60})
    pod.start()
    wait_until(lambda: "fake engine starts" in pod.log)
    assert pod.get("/ready")[0] == 0
    pod.terminate()
    assert pod.wait_ended() == 143


def test_wrong_flags_are_refused_as_by_the_real_worker(tmp_path: Path) -> None:
    pod = FakePod("decode", tmp_path, engine_args=("--port", "1"))
    pod.start()
    assert pod.wait_ended() == 2
    assert pod.log.splitlines()[-1].startswith("error: --port: set by the operator")


# ---- answers


def test_text_is_the_same_from_every_pod_and_in_every_form(service: Service) -> None:
    expected = service.aggregated.text(PROMPT, max_tokens=30)
    assert len(expected.split()) == 30
    assert service.decode.text(PROMPT, max_tokens=30) == expected
    assert service.prefill.text(PROMPT, max_tokens=30) == expected
    assert stream_text(service.decode, {"prompt": PROMPT, "max_tokens": 30})[0] == expected
    assert service.decode.text(PROMPT + "!", max_tokens=30) != expected
    assert expected.startswith(service.decode.text(PROMPT, max_tokens=3))


def test_chat_is_the_same_as_stream_and_at_once(service: Service) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}
    status, raw = service.decode.post("/v1/chat/completions", body)
    answer = json.loads(raw)
    assert (status, answer["object"], answer["usage"]["completion_tokens"]) == (200, "chat.completion", 9)
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    streamed, usage = stream_text(service.aggregated, body, path="/v1/chat/completions")
    assert (streamed, usage) == (message["content"], answer["usage"])


def stream_text(pod: FakePod, body: dict[str, Any], *, path: str = "/v1/completions") -> tuple[str, Any]:
    """The text of a stream, and its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, raw = pod.post(path, {"model": "fake", **body, **options})
    assert status == 200, raw
    events = [event.removeprefix("data: ") for event in raw.decode().split("\n\n") if event]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    choices = [choice for part in parts for choice in part["choices"]]
    texts = [c["text"] if "text" in c else c["delta"]["content"] for c in choices]
    assert [c["finish_reason"] for c in choices][-1] == "length"
    return "".join(texts), parts[-1]["usage"]


def test_requests_are_honoured_and_refused_as_by_the_engine(service: Service) -> None:
    pod = service.aggregated
    full = pod.complete(PROMPT, max_tokens=20, n=2)
    assert full["usage"]["total_tokens"] == full["usage"]["prompt_tokens"] + 40
    first, second = (choice["text"] for choice in full["choices"])
    assert first != second
    stop = first.split()[5]
    stopped = pod.complete(PROMPT, max_tokens=20, stop=[f" {stop}"])["choices"][0]
    assert stopped["text"] == first[: first.index(f" {stop}")]
    assert stopped["finish_reason"] == "stop"
    assert pod.complete(PROMPT)["usage"]["completion_tokens"] == 16
    pod.steer(answer_tokens=5)
    ended = pod.complete(PROMPT, max_tokens=20)["choices"][0]
    assert (len(ended["text"].split()), ended["finish_reason"]) == (5, "stop")
    assert pod.complete(PROMPT, max_tokens=20, ignore_eos=True)["choices"][0]["finish_reason"] == "length"
    assert pod.complete(list(range(50)), max_tokens=1)["usage"]["prompt_tokens"] == 50
    for body, expected, param in (
        ({"model": "other", "prompt": "x"}, 404, "model"),
        ({"model": "fake"}, 400, "prompt"),
        ({"model": "fake", "prompt": "x", "max_tokens": 10**6}, 400, "max_tokens"),
    ):
        status, raw = pod.post("/v1/completions", body)
        assert (status, json.loads(raw)["error"]["param"]) == (expected, param)


def test_clients_that_leave_end_their_request(service: Service) -> None:
    pod = service.aggregated
    pod.steer(time_per_output_token_ms=200)
    before = pod.stats()
    status, _ = pod.post("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 200}, timeout_seconds=0.3)
    assert status == 0
    wait_until(lambda: pod.stats().requests.cancelled - before.requests.cancelled == 1)
    wait_until(lambda: pod.metric("vllm:num_requests_running") == 0)
    assert pod.metric("vllm:kv_cache_usage_perc") == 0


# ---- statistics


def test_statistics_of_a_disaggregated_request_move_on_both_pods(service: Service) -> None:
    prefill, decode = settled_stats(service.prefill), settled_stats(service.decode)
    served, loaded = prefill.kv_transfer, decode.kv_transfer
    answer = service.decode.complete(PROMPT, max_tokens=12)
    now = stats_when(service.decode, lambda now: now.kv_transfer.remote_prefills > loaded.remote_prefills)
    moved = now.kv_transfer
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert moved.remote_prefills - loaded.remote_prefills == 1
    assert moved.loaded_tokens - loaded.loaded_tokens == prompt_tokens - 1
    assert now.requests.output_tokens - decode.requests.output_tokens == 12
    assert now.requests.prompt_tokens - decode.requests.prompt_tokens == prompt_tokens
    assert now.speculation.refilled_sequences - decode.speculation.refilled_sequences == 1
    theirs = stats_when(
        service.prefill,
        lambda now: now.kv_transfer.served_transfers > served.served_transfers and not now.kv_transfer.open_leases,
    ).kv_transfer
    assert theirs.served_transfers - served.served_transfers == 1
    assert theirs.served_bytes - served.served_bytes == moved.loaded_bytes - loaded.loaded_bytes > 0
    assert service.decode.metric("specserve_worker_kv_loaded_tokens_total") == moved.loaded_tokens
    assert fallbacks(now) == fallbacks(decode)


def test_every_rank_moves_its_own_blocks(tmp_path: Path) -> None:
    engine_args = (*BLOCKS, "--tensor-parallel-size", "2")
    prefill = FakePod("prefill", tmp_path, engine_args=engine_args)
    flags = ("--prefill-peers", f"{PEERS}:8000")
    decode = FakePod("decode", tmp_path, flags=flags, engine_args=engine_args, behaviour={"kv_block_bytes": 64})
    prefill.behaviour = decode.behaviour
    (tmp_path / PEERS).write_text(prefill.host)
    with prefill, decode:
        tokens = decode.complete(PROMPT, max_tokens=2)["usage"]["prompt_tokens"]
        moved = stats_when(decode, lambda now: now.kv_transfer.remote_prefills == 1).kv_transfer
        stats_when(prefill, lambda now: now.kv_transfer.served_transfers == 1 and not now.kv_transfer.open_leases)
    blocks, layers, ranks = -(-(tokens - 1) // 16), 2, 2
    assert moved.loaded_bytes == blocks * layers * ranks * 64


def test_latencies_are_those_that_are_asked_for(service: Service) -> None:
    pod = service.aggregated
    pod.steer(time_to_first_token_ms=150, time_per_output_token_ms=30)
    before = pod.stats().requests
    stream_text(pod, {"prompt": PROMPT, "max_tokens": 10})
    after = pod.stats().requests

    def mean_ms(name: str) -> float:
        old, new = getattr(before, name), getattr(after, name)
        assert sum(new.counts) - sum(old.counts) == 1
        return float(new.sum_ms - old.sum_ms)

    # A machine under load adds to them, and takes nothing away.
    assert mean_ms("time_to_first_token") >= 150
    assert mean_ms("time_per_output_token") >= 29
    assert pod.metric("vllm:time_to_first_token_seconds_count") >= 1


def test_sequences_beside_each_other_slow_each_other_down(service: Service) -> None:
    pod = service.aggregated
    pod.steer(time_per_output_token_ms=10, slowdown_ratio=1.0)

    def seconds(count: int) -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda number: pod.complete(f"prompt {number}", max_tokens=20), range(count)))
        return time.monotonic() - began

    # 19 steps each: of 10 ms alone, of 40 ms among four.
    assert seconds(1) >= 0.19
    assert seconds(4) >= 0.7


def test_drafts_are_accepted_as_often_as_asked_and_follow_the_policy(service: Service) -> None:
    pod = service.decode
    pod.steer(acceptance_ratio=0.5)
    generation = pod.stats().speculation.generation + 1
    static = pb.SpeculationSettings(
        policy=pb.LENGTH_POLICY_STATIC, cap=pb.BATCH_CAP_NONE, max_tokens=4, static_tokens=4
    )
    request = pb.SetSpeculationRequest(generation=generation, settings=static)
    assert pod.call("SetSpeculation", request).applied
    pod.complete("x", max_tokens=151)  # 50 steps of 3 tokens after the first

    def of_static(stats: pb.GetStatsResponse) -> pb.PolicyStats:
        by_policy = {entry.policy: entry for entry in stats.speculation.by_policy}
        return by_policy.get(pb.LENGTH_POLICY_STATIC, pb.PolicyStats())

    counts = of_static(stats_when(pod, lambda now: of_static(now).verified_sequences == 50))
    assert counts.accepted_tokens / counts.drafted_tokens == pytest.approx(0.5, abs=0.02)
    assert sum(counts.drafted_by_position) == counts.drafted_tokens
    assert list(counts.accepted_by_position) == sorted(counts.accepted_by_position, reverse=True)
    older = pb.SetSpeculationRequest(generation=generation - 1, settings=static)
    answer = pod.call("SetSpeculation", older)
    assert (answer.applied, answer.generation) == (False, generation)
    assert pod.metric("vllm:spec_decode_num_draft_tokens_total") >= counts.drafted_tokens


def test_the_state_file_is_obeyed(service: Service) -> None:
    pod = service.decode
    generation = pod.stats().speculation.generation + 1
    speculation = {"policy": "Off", "cap": "None", "minTokens": 0, "maxTokens": 4, "staticTokens": 0}
    state = {"version": 1, "generation": generation, "speculation": speculation}
    pod.runtime_state.write_text(json.dumps(state))
    wait_until(lambda: pod.stats().speculation.generation == generation)
    before = pod.stats()
    pod.complete("x", max_tokens=11)
    steps = before.speculation.steps_without_draft + 10
    after = stats_when(pod, lambda now: now.speculation.steps_without_draft == steps).speculation
    assert after.in_force.policy == pb.LENGTH_POLICY_OFF
    assert after.draft_forwards == before.speculation.draft_forwards
