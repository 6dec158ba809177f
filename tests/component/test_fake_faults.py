"""Every fault that a fake pod can be told to have does what it says, to its clients and in its statistics."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

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
from tests.fakes.engine.process import FakePod
from tests.fakes.waiting import wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("pods")) as service:
        yield service


@pytest.fixture
def service(shared: Service) -> Service:
    shared.reset()
    return shared


def test_pod_is_unready_or_unhealthy_by_order(service: Service) -> None:
    pod = service.aggregated
    pod.steer(ready=False)
    assert (pod.get("/ready")[0], pod.get("/health")[0]) == (503, 200)
    pod.steer(ready=True, healthy=False)
    assert (pod.get("/ready")[0], pod.get("/health")[0]) == (200, 503)
    assert pod.request("DELETE", "/fake")[0] == 200
    assert (pod.get("/ready")[0], pod.get("/health")[0]) == (200, 200)


def test_behaviour_that_there_is_none_of_is_refused_by_name(service: Service) -> None:
    pod = service.aggregated
    for fields, message in (
        ({"redy": False}, "redy: no field"),
        ({"error_ratio": 1.5}, "error_ratio: 1.5 is not in 0-1"),
        ({"hang_http": 1}, "hang_http: 1 is no bool"),
        ({"kv_refuse": "BUSY"}, "kv_refuse: 'BUSY' is no gRPC status"),
    ):
        status, raw = pod.post("/fake", fields)
        assert (status, message in raw.decode()) == (400, True), raw
    assert json.loads(pod.get("/fake")[1])["error_ratio"] == 0


def test_a_share_of_the_requests_fails(service: Service) -> None:
    pod = service.aggregated
    pod.steer(error_ratio=0.25, error_status=502)
    before = pod.stats().requests
    statuses = [pod.post("/v1/completions", {"model": "fake", "prompt": "x"})[0] for _ in range(8)]
    assert statuses == [200, 200, 200, 502] * 2
    after = pod.stats().requests
    assert (after.failed - before.failed, after.succeeded - before.succeeded) == (2, 6)


def test_hanging_engine_answers_probes_and_goes_on_later(service: Service) -> None:
    pod = service.aggregated
    pod.steer(hang_requests=True)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pod.text, PROMPT, max_tokens=2)
        wait_until(lambda: pod.stats().requests.running == 1)
        assert (pod.get("/health")[0], pod.get("/ready")[0]) == (200, 200)
        assert not waiting.done()
        pod.steer(hang_requests=False)
        assert len(waiting.result(10).split()) == 2


def test_hanging_http_and_control_answer_nothing_until_released(service: Service) -> None:
    pod = service.aggregated
    pod.steer(hang_http=True, hang_control=True)
    assert pod.request("GET", "/health", timeout_seconds=0.3)[0] == 0
    with pytest.raises(grpc.RpcError) as refused:
        pod.stats(timeout_seconds=0.3)
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    pod.steer(hang_http=False, hang_control=False)
    assert pod.get("/health")[0] == 200
    assert pod.stats().pod_name == pod.name


def test_statistics_lie_and_fail_by_order(service: Service) -> None:
    pod = service.aggregated
    lies = {"podUid": "another", "requests": {"started": 10**9, "timeToFirstToken": {"counts": [1, 2]}}}
    pod.steer(stats=lies)
    stats = pod.stats()
    assert (stats.pod_uid, stats.requests.started, stats.pod_name) == ("another", 10**9, pod.name)
    assert list(stats.requests.time_to_first_token.counts) == [1, 2]
    assert len(stats.requests.time_to_first_token.upper_bounds_ms) == 70
    pod.steer(stats={}, stats_error="RESOURCE_EXHAUSTED")
    with pytest.raises(grpc.RpcError) as refused:
        pod.stats()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"kv_refuse": "RESOURCE_EXHAUSTED"}, "producer_busy"),
        ({"kv_refuse": "INTERNAL"}, "producer_error"),
        ({"kv_corrupt": "wire"}, "checksum"),
        ({"kv_delay_ms": 900.0}, "stalled"),
        ({"error_ratio": 1.0}, "prefill_error"),
    ],
)
def test_faults_of_the_prefill_pod_are_made_up_for_and_counted(
    service: Service, fault: dict[str, Any], cause: str
) -> None:
    expected = service.aggregated.text(PROMPT, max_tokens=6)
    service.prefill.steer(**fault)
    before = settled_stats(service.decode)
    assert service.decode.text(PROMPT, max_tokens=6) == expected
    count = fallbacks(before).get(cause, 0) + 1
    after = stats_when(service.decode, lambda now: fallbacks(now).get(cause, 0) == count)
    assert after.kv_transfer.remote_prefills == before.kv_transfer.remote_prefills


def test_slow_kv_within_its_limit_is_only_slow(service: Service) -> None:
    service.prefill.steer(kv_delay_ms=100)
    before = settled_stats(service.decode)
    began = time.monotonic()
    service.decode.text(PROMPT, max_tokens=1)
    assert time.monotonic() - began >= 0.2  # a chunk for each of two layers
    stats_when(service.decode, lambda now: now.kv_transfer.remote_prefills > before.kv_transfer.remote_prefills)


def test_blocks_of_another_prompt_are_noticed(service: Service) -> None:
    service.prefill.steer(kv_corrupt="content")
    status, raw = service.decode.post("/v1/completions", {"model": "fake", "prompt": PROMPT, "max_tokens": 4})
    assert status == 500
    assert "WrongBlocksError" in json.loads(raw)["error"]["message"]


def test_request_fails_without_its_blocks_where_the_pod_is_told_so(service: Service) -> None:
    folder = service.prefill.folder
    flags = ("--prefill-peers", f"{PEERS}:8000", "--kv-on-failure", "Fail")
    service.prefill.steer(kv_refuse="INTERNAL")
    with FakePod("decode", folder, flags=flags, engine_args=BLOCKS) as pod:
        status, raw = pod.post("/v1/completions", {"model": "fake", "prompt": PROMPT, "max_tokens": 4})
        assert (status, "LoadFailedError" in raw.decode()) == (500, True)
        service.prefill.steer(kv_refuse="")
        assert pod.text(PROMPT, max_tokens=4) != ""


def test_clients_that_leave_while_blocks_are_on_their_way_leave_nothing_behind(service: Service) -> None:
    service.prefill.steer(kv_delay_ms=250)
    pod = service.decode
    before = settled_stats(pod)
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 4}
    assert pod.post("/v1/completions", body, timeout_seconds=0.3)[0] == 0
    after = stats_when(pod, lambda now: now.requests.cancelled > before.requests.cancelled)
    assert after.requests.running == 0
    wait_until(lambda: pod.metric("vllm:kv_cache_usage_perc") == 0)
    wait_until(lambda: service.prefill.metric("vllm:kv_cache_usage_perc") == 0)
    assert fallbacks(pod.stats()) == fallbacks(before)


def test_sequences_wait_for_room_in_the_kv_cache(tmp_path: Path) -> None:
    behaviour = {"kv_cache_blocks": 10, "ballast_mib": 64, "time_per_output_token_ms": 20}
    with FakePod("decode", tmp_path, engine_args=("--block-size", "16"), behaviour=behaviour) as pod:
        assert pod.process is not None
        assert psutil.Process(pod.process.pid).memory_info().rss > 90 << 20
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(pod.text, f"prompt {n}", max_tokens=100) for n in range(2)]
            wait_until(lambda: pod.metric("vllm:num_requests_waiting") == 1)
            assert pod.metric("vllm:num_requests_running") == 1
            assert pod.metric("vllm:kv_cache_usage_perc") == pytest.approx(0.7)
            assert [len(text.result(20).split()) for text in both] == [100, 100]
        assert pod.post("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 500})[0] == 400


def test_pod_is_killed_by_the_request_that_it_is_told(tmp_path: Path) -> None:
    with FakePod("decode", tmp_path) as pod:
        pod.steer(crash_after_requests=2)
        assert pod.text("x") != ""
        assert pod.post("/v1/completions", {"model": "fake", "prompt": "x"})[0] == 0
        assert pod.wait_ended() == -signal.SIGKILL


def test_engine_that_dies_within_an_answer_ends_the_pod_with_its_reason(tmp_path: Path) -> None:
    with FakePod("decode", tmp_path) as pod:
        pod.steer(crash_after_requests=1, crash_after_tokens=3, crash="engine")
        body = {"model": "fake", "prompt": "x", "max_tokens": 9, "stream": True}
        raw = pod.post("/v1/completions", body)[1].decode()
        assert raw.count('"text": " ') == 3
        assert '"error"' in raw
        assert pod.wait_ended() == 1
    line = "error: the engine died: EngineDeadError: the fake engine was told to die"
    assert (pod.log.splitlines()[-1], pod.termination_log.read_text()) == (line, line + "\n")


def test_signal_to_stop_drains_or_is_ignored_by_order(tmp_path: Path) -> None:
    with FakePod("decode", tmp_path, behaviour={"ignore_sigterm": True, "time_per_output_token_ms": 40}) as pod:
        pod.terminate()
        wait_until(lambda: "SIGTERM is ignored" in pod.log)
        assert pod.text("x", max_tokens=2) != ""
        pod.steer(ignore_sigterm=False)
        texts: list[str] = []
        request = threading.Thread(target=lambda: texts.append(pod.text("x", max_tokens=30)))
        request.start()
        wait_until(lambda: pod.stats().requests.running == 1)
        pod.terminate()
        assert wait_until(lambda: pod.get("/ready")[0] == 503)
        assert pod.wait_ended() == 0
        request.join(10)
        assert len(texts[0].split()) == 30
