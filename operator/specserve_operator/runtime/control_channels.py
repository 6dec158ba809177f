"""gRPC channels to the control ports of pods. The only place that opens one."""

from collections.abc import Collection
from dataclasses import dataclass, field

import grpc

from specserve_operator.constants import PORT_CONTROL
from specserve_protos.v1alpha1 import control_pb2, control_pb2_grpc

# A pod that was restarted listens again on the same address: the default back-off of up to two minutes is too long.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.enable_http_proxy", 0),
)


class PodUnreachableError(Exception):
    """The pod did not answer in time, or refused."""


@dataclass(slots=True)
class ControlChannels:
    """One channel for each pod address, opened when it is first used and kept until `keep_only` drops it.

    `credentials`: None for plain text.
    """

    credentials: grpc.ChannelCredentials | None = None
    port: int = PORT_CONTROL
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def get_stats(self, pod_ip: str, *, timeout_seconds: float) -> control_pb2.GetStatsResponse:
        """Raises `PodUnreachableError`."""
        try:
            call = self._stub(pod_ip).GetStats(control_pb2.GetStatsRequest(), timeout=timeout_seconds)
            answer: control_pb2.GetStatsResponse = await call
        except grpc.aio.AioRpcError as error:
            raise PodUnreachableError(f"GetStats of {pod_ip}: {_explain(error)}") from error
        return answer

    async def set_speculation(
        self, pod_ip: str, request: control_pb2.SetSpeculationRequest, *, timeout_seconds: float
    ) -> control_pb2.SetSpeculationResponse:
        """Raises `PodUnreachableError`."""
        try:
            call = self._stub(pod_ip).SetSpeculation(request, timeout=timeout_seconds)
            answer: control_pb2.SetSpeculationResponse = await call
        except grpc.aio.AioRpcError as error:
            raise PodUnreachableError(f"SetSpeculation of {pod_ip}: {_explain(error)}") from error
        return answer

    async def keep_only(self, pod_ips: Collection[str]) -> None:
        """Closes the channels of all other addresses."""
        for pod_ip in self._channels.keys() - set(pod_ips):
            await self._channels.pop(pod_ip).close()

    async def close(self) -> None:
        """Closes all channels."""
        await self.keep_only(())

    def _stub(self, pod_ip: str) -> control_pb2_grpc.ControlServiceStub:
        channel = self._channels.get(pod_ip)
        if channel is None:
            target = f"[{pod_ip}]:{self.port}" if ":" in pod_ip else f"{pod_ip}:{self.port}"
            if self.credentials is None:
                channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(target, self.credentials, options=_OPTIONS)
            self._channels[pod_ip] = channel
        return control_pb2_grpc.ControlServiceStub(channel)


def _explain(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
