"""gRPC channels to the control ports of pods. The only place that opens one."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import grpc

from specserve_operator.constants import PORT_CONTROL
from specserve_operator.identity.names import pod_host
from specserve_operator.identity.operator_tls import OperatorTls
from specserve_protos.v1alpha1 import control_pb2, control_pb2_grpc

# A pod that was restarted listens again on the same address: the default back-off of up to two minutes is too long.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    # Also how long a connection may take to be made. A busy pod needs a while for its part of the handshake.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.enable_http_proxy", 0),
)


# For a call that is under way when a channel is replaced.
_CLOSE_SECONDS = 2.0


class PodUnreachableError(Exception):
    """The pod did not answer in time, or refused."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A channel, whose certificate it shows (version), and whose it wants to see (uid); None for plain text."""

    channel: grpc.aio.Channel
    certified_uid: str | None
    version: int | None


@dataclass(slots=True)
class ControlChannels:
    """One channel for each pod address, opened when it is first used and kept until `keep_only` drops it.

    `tls`: the operator's certificate; None where no pod has one. A pod that has one (`certified_uid` of a call) is
    talked to only if it shows the certificate of that very pod, and never in plain text.
    """

    tls: OperatorTls | None = None
    port: int = PORT_CONTROL
    _channels: dict[str, _Open] = field(default_factory=dict)

    async def get_stats(
        self, pod_ip: str, *, timeout_seconds: float, certified_uid: str | None = None
    ) -> control_pb2.GetStatsResponse:
        """Raises `PodUnreachableError`."""
        try:
            stub = await self._stub(pod_ip, certified_uid)
            answer: control_pb2.GetStatsResponse = await stub.GetStats(
                control_pb2.GetStatsRequest(), timeout=timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            raise PodUnreachableError(f"GetStats of {pod_ip}: {_explain(error)}") from error
        return answer

    async def set_speculation(
        self,
        pod_ip: str,
        request: control_pb2.SetSpeculationRequest,
        *,
        timeout_seconds: float,
        certified_uid: str | None = None,
    ) -> control_pb2.SetSpeculationResponse:
        """Raises `PodUnreachableError`."""
        try:
            stub = await self._stub(pod_ip, certified_uid)
            answer: control_pb2.SetSpeculationResponse = await stub.SetSpeculation(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise PodUnreachableError(f"SetSpeculation of {pod_ip}: {_explain(error)}") from error
        return answer

    async def keep_only(self, pod_ips: Collection[str]) -> None:
        """Closes the channels of all other addresses."""
        await self.drop(self._channels.keys() - set(pod_ips))

    async def drop(self, pod_ips: Iterable[str]) -> None:
        """Closes the channels of these addresses, if there are any."""
        for pod_ip in pod_ips:
            if (known := self._channels.pop(pod_ip, None)) is not None:
                await known.channel.close()

    async def close(self) -> None:
        """Closes all channels."""
        await self.keep_only(())

    async def _stub(self, pod_ip: str, certified_uid: str | None) -> control_pb2_grpc.ControlServiceStub:
        """Over the open channel, if that is to the same pod and shows the certificate of now; else over a new one."""
        version, credentials = self._credentials(pod_ip, certified_uid)
        known = self._channels.get(pod_ip)
        if known is None or (known.certified_uid, known.version) != (certified_uid, version):
            channel = self._open(pod_ip, certified_uid, credentials)
            self._channels[pod_ip] = _Open(channel, certified_uid, version)
            if known is not None:
                await known.channel.close(_CLOSE_SECONDS)
        return control_pb2_grpc.ControlServiceStub(self._channels[pod_ip].channel)

    def _credentials(self, pod_ip: str, certified_uid: str | None) -> tuple[int | None, grpc.ChannelCredentials | None]:
        if certified_uid is None:
            return None, None
        if self.tls is None:
            raise PodUnreachableError(f"{pod_ip}: it answers to the operator's certificate only, and there is none")
        return self.tls.channel_credentials()

    def _open(
        self, pod_ip: str, certified_uid: str | None, credentials: grpc.ChannelCredentials | None
    ) -> grpc.aio.Channel:
        target = f"[{pod_ip}]:{self.port}" if ":" in pod_ip else f"{pod_ip}:{self.port}"
        if credentials is None or certified_uid is None:
            return grpc.aio.insecure_channel(target, options=_OPTIONS)
        # The address is no name; the pod's certificate has one that nobody else's has.
        options = (*_OPTIONS, ("grpc.ssl_target_name_override", pod_host(certified_uid)))
        return grpc.aio.secure_channel(target, credentials, options=options)


def _explain(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
