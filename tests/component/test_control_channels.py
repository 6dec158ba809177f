"""Channels to the control ports of pods, against a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest

from specserve_operator.runtime.control_channels import ControlChannels, PodUnreachableError
from specserve_protos.v1alpha1 import control_pb2 as pb
from specserve_protos.v1alpha1 import control_pb2_grpc


class Pod(control_pb2_grpc.ControlServiceServicer):
    def __init__(self) -> None:
        self.generation = 0

    async def GetStats(self, request: pb.GetStatsRequest, context: object) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(pod_name="pod", speculation=pb.SpeculationStats(generation=self.generation))

    async def SetSpeculation(self, request: pb.SetSpeculationRequest, context: object) -> pb.SetSpeculationResponse:
        self.generation = request.generation
        return pb.SetSpeculationResponse(generation=request.generation, applied=True)


@dataclass
class Server:
    port: int
    grpc: grpc.aio.Server


async def start(port: int = 0) -> Server:
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(Pod(), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return Server(bound, server)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = await start()
    yield server
    await server.grpc.stop(None)


async def reaches(channels: ControlChannels, pod_ip: str) -> bool:
    """Asks again and again, as the collector does, while the channel backs off."""
    async with asyncio.timeout(15):
        while True:
            try:
                return (await channels.get_stats(pod_ip, timeout_seconds=5)).pod_name == "pod"
            except PodUnreachableError:
                await asyncio.sleep(0.1)


async def test_settings_that_are_pushed_show_in_the_statistics(server: Server) -> None:
    channels = ControlChannels(port=server.port)
    answer = await channels.set_speculation("127.0.0.1", pb.SetSpeculationRequest(generation=4), timeout_seconds=5)
    assert answer.applied
    stats = await channels.get_stats("127.0.0.1", timeout_seconds=5)
    assert (stats.pod_name, stats.speculation.generation) == ("pod", 4)
    await channels.close()


async def test_a_dead_pod_is_an_error_that_names_it_and_one_that_comes_back_answers(server: Server) -> None:
    channels = ControlChannels(port=server.port)
    await channels.get_stats("127.0.0.1", timeout_seconds=5)
    await server.grpc.stop(None)
    with pytest.raises(PodUnreachableError, match=r"GetStats of 127\.0\.0\.1: UNAVAILABLE"):
        await channels.get_stats("127.0.0.1", timeout_seconds=5)
    again = await start(server.port)
    assert await reaches(channels, "127.0.0.1")
    await again.grpc.stop(None)
    await channels.close()


async def test_a_channel_is_closed_when_its_pod_is_gone_and_opened_anew_when_it_is_asked_again(server: Server) -> None:
    channels = ControlChannels(port=server.port)
    await channels.get_stats("127.0.0.1", timeout_seconds=5)
    await channels.keep_only(["127.0.0.9"])
    assert (await channels.get_stats("127.0.0.1", timeout_seconds=5)).pod_name == "pod"
    await channels.close()
