"""Gives back prompts that a prefill pod holds and nobody will fetch, without anybody waiting for it."""

import asyncio
import logging
from collections import OrderedDict

import grpc

from specserve_protos.v1alpha1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from specserve_workers.frontend.disaggregation import TransferParams

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
MAX_CHANNELS = 64


class LeaseReleaser:
    """Calls `Release` on every rank of a lease, in the background. A lost call costs the lease's time and no more."""

    def __init__(self, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._credentials = credentials
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
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
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def _release(self, address: str, lease: bytes) -> None:
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel(address))
        try:
            await stub.Release(kv_transfer_pb2.ReleaseRequest(lease=lease), timeout=TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.warning("lease not released on %s, it will expire: %s", address, error.code().name)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address in self._channels:
            self._channels.move_to_end(address)
            return self._channels[address]
        channel = (
            grpc.aio.insecure_channel(address)
            if self._credentials is None
            else grpc.aio.secure_channel(address, self._credentials)
        )
        self._channels[address] = channel
        if len(self._channels) > MAX_CHANNELS:
            # Calls on it, if any, are cancelled by the close: their leases expire.
            _, oldest = self._channels.popitem(last=False)
            closing = asyncio.create_task(oldest.close(None))
            self._calls.add(closing)
            closing.add_done_callback(self._calls.discard)
        return channel
