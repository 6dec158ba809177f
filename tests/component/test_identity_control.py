"""The operator's calls to the control ports of pods: real TLS on loopback, strangers at every door."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specserve_operator.identity.authority import Authority
from specserve_operator.identity.names import PodId
from specserve_operator.identity.operator_tls import OperatorTls
from specserve_operator.runtime.control_channels import ControlChannels, PodUnreachableError
from specserve_protos.v1alpha1 import control_pb2, control_pb2_grpc
from specserve_workers.control.drain import DrainState
from specserve_workers.control.engine import EngineNumbers
from specserve_workers.control.runtime_state import RuntimeState, SpeculationControl
from specserve_workers.control.service import ControlServer, ControlService, PodIdentity
from specserve_workers.control.stats import ServingStats
from specserve_workers.identity.channels import PeerTls, ServerTls, operator_rule
from specserve_workers.identity.material import MaterialFiles
from specserve_workers.identity.names import ServiceId
from specserve_workers.speculation.settings import PolicyName, SpeculationSettings
from tests.unit.identity.builders import DECODE, PREFILL, certified_files, certify_again, make_authority

SERVICE = ServiceId("llm", "coder")


@pytest.fixture
def authority() -> Authority:
    return make_authority()


class NoEngine:
    async def set_speculation(self, state: RuntimeState) -> None:
        pass

    async def speculation_stats(self) -> dict[str, Any]:
        return {}

    async def kv_stats(self) -> dict[str, Any]:
        return {}


@dataclass
class ControlledPod:
    files: MaterialFiles
    server: ControlServer
    port: int


@pytest.fixture
async def make_pod(tmp_path: Path, authority: Authority) -> AsyncIterator[Callable[..., Any]]:
    made: list[ControlledPod] = []

    async def make(pod: PodId = DECODE, files: MaterialFiles | None = None) -> ControlledPod:
        files = files or certified_files(tmp_path / f"pod-{len(made)}", pod, authority)
        stats, drain, engine = ServingStats(), DrainState(), NoEngine()
        control = SpeculationControl(
            SpeculationSettings(PolicyName.DSDE, max_tokens=4), started_max_tokens=4, apply=engine.set_speculation
        )
        service = ControlService(
            PodIdentity(name="coder-decode-1", uid=pod.uid, pool=pod.pool, revision="r1"),
            stats=stats,
            numbers=EngineNumbers(engine, activity=lambda: 0),
            speculation=control,
            drain=drain,
        )
        server = ControlServer(service, tls=ServerTls(files, operator_rule()))
        port = await server.start("127.0.0.1", 0)
        made.append(ControlledPod(files, server, port))
        return made[-1]

    yield make
    for pod in made:
        await pod.server.stop(0)


@pytest.fixture
async def operator(authority: Authority) -> AsyncIterator[Callable[[int], ControlChannels]]:
    made: list[ControlChannels] = []
    tls = OperatorTls(lambda: authority, hosts=("operator.svc",), now=lambda: datetime.now(UTC))

    def make(port: int) -> ControlChannels:
        made.append(ControlChannels(tls=tls, port=port))
        return made[-1]

    yield make
    for channels in made:
        await channels.close()


async def test_the_operator_reaches_the_very_pod_that_it_means(
    make_pod: Callable[..., Any], operator: Callable[[int], ControlChannels]
) -> None:
    pod = await make_pod()
    channels = operator(pod.port)
    answer = await channels.get_stats("127.0.0.1", timeout_seconds=5, certified_uid=DECODE.uid)
    assert answer.pod_uid == DECODE.uid
    request = control_pb2.SetSpeculationRequest(
        generation=2,
        settings=control_pb2.SpeculationSettings(
            policy=control_pb2.LENGTH_POLICY_OFF, cap=control_pb2.BATCH_CAP_NONE, max_tokens=4
        ),
    )
    pushed = await channels.set_speculation("127.0.0.1", request, timeout_seconds=5, certified_uid=DECODE.uid)
    assert pushed.applied is True


async def test_another_pod_on_the_address_is_not_taken_for_it(
    make_pod: Callable[..., Any], operator: Callable[[int], ControlChannels]
) -> None:
    pod = await make_pod()
    channels = operator(pod.port)
    with pytest.raises(PodUnreachableError, match="Hostname Verification"):
        await channels.get_stats("127.0.0.1", timeout_seconds=5, certified_uid="another-uid")
    # Nor does a channel to one pod serve for the next pod on its address.
    await channels.get_stats("127.0.0.1", timeout_seconds=5, certified_uid=DECODE.uid)
    with pytest.raises(PodUnreachableError):
        await channels.get_stats("127.0.0.1", timeout_seconds=5, certified_uid="another-uid")


async def test_a_pod_without_a_certificate_is_not_spoken_to_in_plain_text(
    make_pod: Callable[..., Any], operator: Callable[[int], ControlChannels], tmp_path: Path, authority: Authority
) -> None:
    files = MaterialFiles(tmp_path / "late")
    pod = await make_pod(files=files)
    channels = operator(pod.port)
    with pytest.raises(PodUnreachableError):
        await channels.get_stats("127.0.0.1", timeout_seconds=5, certified_uid=DECODE.uid)
    certify_again(files, DECODE, authority)
    # Another channel: the first one waits a little before it tries again.
    await operator(pod.port).get_stats("127.0.0.1", timeout_seconds=5, certified_uid=DECODE.uid)


async def test_an_operator_without_a_certificate_does_not_try(make_pod: Callable[..., Any]) -> None:
    pod = await make_pod()
    channels = ControlChannels(port=pod.port)
    with pytest.raises(PodUnreachableError, match="there is none"):
        await channels.get_stats("127.0.0.1", timeout_seconds=5, certified_uid=DECODE.uid)
    with pytest.raises(PodUnreachableError):
        await channels.get_stats("127.0.0.1", timeout_seconds=2)
    await channels.close()


@pytest.mark.parametrize("who", [DECODE, PREFILL, PodId("llm", "other", "decode", "x")], ids=lambda p: p.uri)
async def test_no_pod_controls_another(
    who: PodId, make_pod: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    pod = await make_pod()
    files = certified_files(tmp_path / "stranger", who, authority)
    tls = PeerTls(files, SERVICE, pool="decode").current()
    async with grpc.aio.secure_channel(f"127.0.0.1:{pod.port}", tls.credentials, options=tls.options) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        for call in (
            stub.GetStats(control_pb2.GetStatsRequest(), timeout=5),
            stub.Drain(control_pb2.DrainRequest(timeout_seconds=1), timeout=5),
            health.Check(health_pb2.HealthCheckRequest(), timeout=5),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert f"only the operator may call this, and the caller is {who.uri}" in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in health.Watch(health_pb2.HealthCheckRequest(), timeout=5):
                pass


async def test_channels_go_over_to_new_certificates_and_authorities(
    make_pod: Callable[..., Any], authority: Authority
) -> None:
    other = make_authority()
    now_signing = [authority]
    tls = OperatorTls(lambda: now_signing[0], hosts=("operator.svc",), now=lambda: datetime.now(UTC))
    pod = await make_pod()
    channels = ControlChannels(tls=tls, port=pod.port)
    await channels.get_stats("127.0.0.1", timeout_seconds=5, certified_uid=DECODE.uid)
    now_signing[0] = other
    certify_again(pod.files, DECODE, other)
    await channels.get_stats("127.0.0.1", timeout_seconds=5, certified_uid=DECODE.uid)
    await channels.close()
