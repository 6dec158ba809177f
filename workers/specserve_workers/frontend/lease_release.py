"""Gives back prompts that a prefill pod holds and nobody will fetch, without anybody waiting for it."""

import asyncio
import logging
from collections import OrderedDict

import grpc

from specserve_protos.v1alpha1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from specserve_workers.frontend.disaggregation import TransferParams
from specserve_workers.identity.channels import ChannelTls, PeerTls
from specserve_workers.identity.material import NoIdentityError

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
MAX_CHANNELS = 64


class LeaseReleaser:
    """Calls `Release` on every rank of a lease, in the background. A lost call costs the lease's time and no more."""

    def __init__(self, *, tls: PeerTls | None = None) -> None:
        """`tls`: of the prefill pods; None connects in plaintext."""
        self._tls = tls
        # With the version of the certificate that they show.
        self._channels: OrderedDict[str, tuple[grpc.aio.Channel, int | None]] = OrderedDict()
        self._calls: set[asyncio.Task[None]] = set()

    def release(self, params: TransferParams) -> None:
        for address in params.rank_addresses:
            call = asyncio.create_task(self._release(address, params.lease))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def aclose(self) -> None:
        """Lets the calls that are under way end, then closes the channels."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=TIMEOUT_SECONDS)
        await asyncio.gather(*(channel.close(None) for channel, _ in self._channels.values()))

    async def _release(self, address: str, lease: bytes) -> None:
        try:
            stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel(address))
            await stub.Release(kv_transfer_pb2.ReleaseRequest(lease=lease), timeout=TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.warning("lease not released on %s, it will expire: %s", address, error.code().name)
        except NoIdentityError as error:
            logger.warning("lease not released on %s, it will expire: %s", address, error)

    def _channel(self, address: str) -> grpc.aio.Channel:
        tls = None if self._tls is None else self._tls.current()
        version = None if tls is None else tls.version
        known = self._channels.pop(address, None)
        if known is not None and known[1] != version:
            self._close(known[0])
            known = None
        channel = _open(address, tls) if known is None else known[0]
        self._channels[address] = channel, version
        if len(self._channels) > MAX_CHANNELS:
            self._close(self._channels.popitem(last=False)[1][0])
        return channel

    def _close(self, channel: grpc.aio.Channel) -> None:
        """Calls on it that take longer than they may are cancelled: their leases expire."""
        closing = asyncio.create_task(channel.close(TIMEOUT_SECONDS))
        self._calls.add(closing)
        closing.add_done_callback(self._calls.discard)


def _open(address: str, tls: ChannelTls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, tls.credentials, options=tls.options)
