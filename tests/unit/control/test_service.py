from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest

from specserve_protos.v1alpha1 import control_pb2, control_pb2_grpc
from specserve_workers.control.drain import DrainState
from specserve_workers.control.engine import EngineNumbers, EngineUnavailableError
from specserve_workers.control.metrics import WorkerCollector
from specserve_workers.control.runtime_state import RuntimeState, SpeculationControl
from specserve_workers.control.service import SERVICE_NAME, ControlPortError, ControlServer, ControlService, PodIdentity
from specserve_workers.control.stats import FallbackCause, RequestOutcome, ServingStats
from specserve_workers.identity.keeper import IdentityStatus
from specserve_workers.speculation.settings import PolicyName, SpeculationSettings


class FakeEngine:
    def __init__(self) -> None:
        self.in_force: list[RuntimeState] = []
        self.down = False
        self.asked = 0
        self.speculation: dict[str, Any] = {
            "by_policy": [
                {
                    "policy": "DSDE",
                    "verified_sequences": 3,
                    "drafted_tokens": 9,
                    "accepted_tokens": 6,
                    "drafted_by_position": [3, 3, 3],
                    "accepted_by_position": [3, 2, 1],
                    "kld_sum_nats": 1.5,
                    "kld_positions": 9,
                }
            ],
            "draft_forwards": 11,
            "in_force": {},
        }
        self.kv: dict[str, Any] = {"loaded_tokens": 70, "loaded_bytes": 700, "fallbacks": {"connect": 2}}

    async def set_speculation(self, state: RuntimeState) -> None:
        if self.down:
            raise EngineUnavailableError("dead")
        self.in_force.append(state)

    async def speculation_stats(self) -> dict[str, Any]:
        self.asked += 1
        if self.down:
            raise EngineUnavailableError("dead")
        return self.speculation

    async def kv_stats(self) -> dict[str, Any]:
        return self.kv


class Pod:
    """A control server on loopback over a fake engine."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.stats = ServingStats()
        self.drain = DrainState()
        self.numbers = EngineNumbers(self.engine, activity=lambda: self.stats.activity)
        self.control = SpeculationControl(
            SpeculationSettings(PolicyName.DSDE, max_tokens=4),
            started_max_tokens=4,
            apply=self.engine.set_speculation,
        )
        identity = PodIdentity(name="coder-decode-1", uid="u1", pool="decode", revision="r1")
        self.service = ControlService(
            identity, stats=self.stats, numbers=self.numbers, speculation=self.control, drain=self.drain
        )
        self.stub: Any = None
        self.channel: Any = None
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Pod"]:
        server = ControlServer(self.service)
        self.port = await server.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as self.channel:
            self.stub = control_pb2_grpc.ControlServiceStub(self.channel)
            yield self
        await server.stop(0)


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    async with Pod().serving() as pod:
        yield pod


async def test_stats_carry_identity_requests_speculation_and_transfers(pod: Pod):
    for _ in range(4):
        pod.stats.begin()
    pod.stats.end(RequestOutcome.SUCCEEDED)
    pod.stats.end(RequestOutcome.CANCELLED)
    pod.stats.end(RequestOutcome.CANCELLED)
    pod.stats.time_to_first_token.observe(30.0)
    pod.stats.output_tokens = 12
    pod.stats.fallbacks[FallbackCause.NO_PEERS] = 1
    await pod.numbers.refresh()
    reply = await pod.stub.GetStats(control_pb2.GetStatsRequest(), timeout=5)
    assert (reply.pod_name, reply.pod_uid, reply.pool, reply.revision) == ("coder-decode-1", "u1", "decode", "r1")
    assert (reply.requests.started, reply.requests.succeeded, reply.requests.running) == (4, 1, 1)
    assert (reply.requests.cancelled, reply.requests.failed, reply.requests.refused) == (2, 0, 0)
    assert sum(reply.requests.time_to_first_token.counts) == 1
    assert len(reply.requests.time_to_first_token.counts) == 1 + len(reply.requests.time_to_first_token.upper_bounds_ms)
    assert reply.requests.output_tokens == 12
    assert reply.speculation.by_policy[0].policy == control_pb2.LENGTH_POLICY_DSDE
    assert list(reply.speculation.by_policy[0].accepted_by_position) == [3, 2, 1]
    assert reply.speculation.draft_forwards == 11
    assert reply.speculation.started_max_tokens == 4
    assert reply.kv_transfer.loaded_tokens == 70
    assert {f.cause: f.count for f in reply.kv_transfer.fallbacks} == {"connect": 2, "no_peers": 1}


async def test_stats_are_answered_without_asking_the_engine(pod: Pod):
    await pod.stub.GetStats(control_pb2.GetStatsRequest(), timeout=5)
    assert pod.engine.asked == 0


async def test_numbers_of_before_stay_when_the_engine_does_not_answer(pod: Pod):
    await pod.numbers.refresh()
    pod.engine.down = True
    await pod.numbers.refresh()
    reply = await pod.stub.GetStats(control_pb2.GetStatsRequest(), timeout=5)
    assert reply.speculation.draft_forwards == 11


def settings(**changes: Any) -> control_pb2.SpeculationSettings:
    fields = {"policy": control_pb2.LENGTH_POLICY_STATIC, "cap": control_pb2.BATCH_CAP_NONE}
    return control_pb2.SpeculationSettings(**(fields | {"max_tokens": 4, "static_tokens": 2} | changes))


async def test_settings_are_applied_and_older_ones_are_not(pod: Pod):
    reply = await pod.stub.SetSpeculation(
        control_pb2.SetSpeculationRequest(generation=5, settings=settings()), timeout=5
    )
    assert (reply.applied, reply.generation, reply.in_force.static_tokens) == (True, 5, 2)
    reply = await pod.stub.SetSpeculation(
        control_pb2.SetSpeculationRequest(generation=4, settings=settings(static_tokens=1)), timeout=5
    )
    assert (reply.applied, reply.generation, reply.in_force.static_tokens) == (False, 5, 2)
    assert [state.generation for state in pod.engine.in_force] == [5]


@pytest.mark.parametrize(
    "changes",
    [{"policy": 0}, {"policy": 99}, {"cap": 0}, {"max_tokens": 65}, {"min_tokens": 5}, {"static_tokens": 9}],
)
async def test_wrong_settings_are_invalid_arguments(pod: Pod, changes: dict[str, int]):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pod.stub.SetSpeculation(
            control_pb2.SetSpeculationRequest(generation=1, settings=settings(**changes)), timeout=5
        )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert pod.engine.in_force == []


async def test_settings_for_a_dead_engine_are_unavailable(pod: Pod):
    pod.engine.down = True
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pod.stub.SetSpeculation(control_pb2.SetSpeculationRequest(generation=1, settings=settings()), timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_drain_starts_at_once_and_says_whether_it_is_done(pod: Pod):
    reply = await pod.stub.Drain(control_pb2.DrainRequest(timeout_seconds=1), timeout=5)
    assert (reply.drained, reply.running) == (True, 0)
    assert pod.drain.draining
    assert (await pod.stub.GetStats(control_pb2.GetStatsRequest(), timeout=5)).draining


async def test_the_standard_health_service_answers_for_the_server_and_the_service(pod: Pod):
    stub = health_pb2_grpc.HealthStub(pod.channel)
    for name in ("", SERVICE_NAME):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_control_port_in_use_is_refused_by_name(pod: Pod):
    with pytest.raises(ControlPortError, match=f"--control-port {pod.port}"):
        await ControlServer(pod.service).start("127.0.0.1", pod.port)


async def test_metrics_say_what_get_stats_says(pod: Pod):
    pod.stats.begin()
    pod.stats.end(RequestOutcome.REFUSED)
    pod.stats.time_to_first_token.observe(2.0)
    await pod.numbers.refresh()
    registry = CollectorRegistry()
    registry.register(WorkerCollector(pool="decode", stats=pod.stats, numbers=pod.numbers, drain=pod.drain))
    text = generate_latest(registry).decode()
    assert 'specserve_worker_requests_total{pool="decode",result="refused"} 1.0' in text
    assert 'specserve_worker_prefill_fallbacks_total{cause="connect",pool="decode"} 2.0' in text
    assert 'specserve_worker_kv_transfer_bytes_total{direction="loaded",pool="decode"} 700.0' in text
    assert 'specserve_worker_draft_tokens_total{policy="DSDE",pool="decode"} 9.0' in text
    assert 'specserve_worker_time_to_first_token_seconds_count{pool="decode"} 1.0' in text


async def test_metrics_say_until_when_there_is_a_certificate(pod: Pod):
    registry = CollectorRegistry()
    status = IdentityStatus(expires_at=1893499200.0, renewals=3, failures=2)
    registry.register(
        WorkerCollector(pool="decode", stats=pod.stats, numbers=pod.numbers, drain=pod.drain, identity=status)
    )
    text = generate_latest(registry).decode()
    assert 'specserve_worker_certificate_expiry_timestamp_seconds{pool="decode"} 1.8934992e+09' in text
    assert 'specserve_worker_certificate_requests_total{pool="decode",result="issued"} 3.0' in text
    assert 'specserve_worker_certificate_requests_total{pool="decode",result="failed"} 2.0' in text


async def test_watchers_of_the_health_service_take_no_place_from_other_calls(pod: Pod):
    stub = health_pb2_grpc.HealthStub(pod.channel)
    for _ in range(80):  # more than the server takes calls at once, and none is closed by its client
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(watch))
        assert await watch.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (await pod.stub.GetStats(control_pb2.GetStatsRequest(), timeout=5)).pod_uid == "u1"
