"""The consumer's side of the wire: fetches leased blocks into this process' tensors.

A transfer has a limit on connecting and a limit on silence, but none on its length. Chunks must come in the one
order the protocol allows, so nothing can be missing, twice or elsewhere in a transfer that ends well.
"""

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from specserve_protos.v1alpha1 import kv_transfer_pb2 as pb
from specserve_protos.v1alpha1 import kv_transfer_pb2_grpc as pb_grpc
from specserve_workers.kv.blocks import KvBlocks
from specserve_workers.kv.channels import ChannelPool
from specserve_workers.kv.errors import (
    ChecksumError,
    ConnectError,
    KvTransferError,
    LayoutMismatchError,
    ProducerBusyError,
    ProducerError,
    PromptMismatchError,
    ProtocolError,
    StalledError,
    TransferCancelledError,
    UnknownLeaseError,
)
from specserve_workers.kv.layout import KvLayout

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_SECONDS: Final = 2.0
_ERROR_BY_STATUS: Final[dict[grpc.StatusCode, type[KvTransferError]]] = {
    grpc.StatusCode.NOT_FOUND: UnknownLeaseError,
    grpc.StatusCode.FAILED_PRECONDITION: LayoutMismatchError,
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ProducerBusyError,
}
_NO_ANSWER: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    """One pull of one rank.

    Attributes:
        address: `host:port` of this rank's server.
        lease: 16 bytes.
        first_block: leading blocks of the prompt that are not wanted.
        block_ids: where the wanted blocks go, in prompt order; at least one.
        prompt_tokens, prompt_sha256: the prompt the consumer has; the producer's must be the same.
    """

    address: str
    lease: bytes
    first_block: int
    block_ids: tuple[int, ...]
    prompt_tokens: int
    prompt_sha256: bytes


class Cancellation:
    """Lets another thread give a fetch up. Thread-safe; may be used before the fetch starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cut: Callable[[], Any] | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Give the fetch up, now and if it has yet to start."""
        with self._lock:
            self.is_cancelled = True
            cut = self._cut
        if cut is not None:
            cut()

    def attach(self, cut: Callable[[], Any]) -> None:
        """Set what `cancel` calls; called at once where it is too late."""
        with self._lock:
            self._cut = cut
            is_late = self.is_cancelled
        if is_late:
            cut()


class KvClient:
    """Fetches and releases. Thread-safe; each fetch blocks its thread.

    Args:
        blocks, layout: of this process' KV cache.
        connect_timeout_ms: limit on connecting.
        stall_timeout_ms: limit on the silence of a transfer.
        credentials: TLS of the client; None connects in plaintext.
    """

    def __init__(
        self,
        *,
        blocks: KvBlocks,
        layout: KvLayout,
        connect_timeout_ms: int,
        stall_timeout_ms: int,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._blocks = blocks
        self._layout = layout
        self._layout_message = layout.to_proto()
        self._connect_seconds = connect_timeout_ms / 1000
        self._stall_seconds = stall_timeout_ms / 1000
        self._channels = ChannelPool(credentials=credentials)

    def fetch(self, order: FetchOrder, *, cancellation: Cancellation | None = None) -> int:
        """Fetch all wanted blocks of all layers into their places and return their bytes.

        Raises a subclass of `KvTransferError`; then some blocks may have been written, and all are to be
        regarded as void.
        """
        cancellation = cancellation or Cancellation()
        if cancellation.is_cancelled:
            raise TransferCancelledError("cancelled before it started")
        with self._channels.channel(order.address) as channel:
            stub = pb_grpc.KvTransferServiceStub(channel)
            call = stub.Fetch(
                pb.FetchRequest(
                    lease=order.lease,
                    layout=self._layout_message,
                    first_block=order.first_block,
                    num_blocks=len(order.block_ids),
                )
            )
            cancellation.attach(call.cancel)
            watch = _Watch(call, connect_seconds=self._connect_seconds, stall_seconds=self._stall_seconds)
            try:
                return self._receive(watch.each_message(), order)
            except grpc.RpcError:
                if cancellation.is_cancelled:
                    raise TransferCancelledError(f"{order.address}: cancelled") from None
                raise watch.explain(order.address) from None
            finally:
                watch.stop()
                call.cancel()

    def release(self, address: str, lease: bytes, *, pulls: int) -> bool:
        """Give up pulls (0: all) of a lease. Best effort: a failure is logged, and the lease then expires."""
        try:
            with self._channels.channel(address) as channel:
                stub = pb_grpc.KvTransferServiceStub(channel)
                response = stub.Release(pb.ReleaseRequest(lease=lease, pulls=pulls), timeout=_RELEASE_TIMEOUT_SECONDS)
                return bool(response.released)
        except (KvTransferError, grpc.RpcError) as error:
            logger.info("KV lease at %s not released, it will expire: %s", address, error)
            return False

    def close(self) -> None:
        """Start no more; what is under way goes on to its end."""
        self._channels.close()

    def _receive(self, messages: Iterator[pb.FetchResponse], order: FetchOrder) -> int:
        header = next(messages, None)
        if header is None or header.WhichOneof("part") != "header":
            raise ProtocolError(f"{order.address}: a header must come first")
        self._check_header(header.header, order)
        received_bytes = 0
        for layer_index, layer in enumerate(self._layout.layers):
            offset = 0
            while offset < len(order.block_ids):
                message = next(messages, None)
                if message is None or message.WhichOneof("part") != "chunk":
                    raise ProtocolError(f"{order.address}: ended in layer {layer.name}, block {offset}")
                chunk = message.chunk
                count, rest = divmod(len(chunk.data), layer.block_bytes)
                if (
                    (chunk.layer_index, chunk.block_offset) != (layer_index, offset)
                    or rest
                    or not 1 <= count <= len(order.block_ids) - offset
                ):
                    raise ProtocolError(f"{order.address}: chunk out of order in layer {layer.name}")
                if zlib.crc32(chunk.data) != chunk.crc32:
                    raise ChecksumError(f"{order.address}: damaged chunk in layer {layer.name}, block {offset}")
                self._blocks.scatter(layer_index, order.block_ids[offset : offset + count], chunk.data)
                offset += count
                received_bytes += len(chunk.data)
        if next(messages, None) is not None:
            raise ProtocolError(f"{order.address}: more than was asked for")
        return received_bytes

    def _check_header(self, header: pb.FetchHeader, order: FetchOrder) -> None:
        if (header.prompt_tokens, header.prompt_sha256) != (order.prompt_tokens, order.prompt_sha256):
            raise PromptMismatchError(
                f"{order.address}: blocks of another prompt of {header.prompt_tokens} tokens, "
                f"this one has {order.prompt_tokens}"
            )
        total_bytes = len(order.block_ids) * self._layout.block_bytes
        if (header.num_blocks, header.total_bytes) != (len(order.block_ids), total_bytes):
            raise ProtocolError(
                f"{order.address}: {header.num_blocks} blocks of {header.total_bytes} bytes announced, "
                f"{len(order.block_ids)} of {total_bytes} wanted"
            )


class _Watch:
    """Cancels a call that is silent for too long. It takes a thread of its own, since reading blocks the caller's.

    The producer answers with its metadata as soon as it sees the call, so until then the limit on connecting holds.
    """

    def __init__(self, call: Any, *, connect_seconds: float, stall_seconds: float) -> None:
        self._call = call
        self._stall_seconds = stall_seconds
        self._connect_seconds = connect_seconds
        self._deadline = 0.0
        self._is_connected = False
        self._is_too_late = False
        self._is_answered = threading.Event()
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="specserve-kv-watch", daemon=True).start()

    def each_message(self) -> Iterator[pb.FetchResponse]:
        """Pass the call's messages on, and start the time anew with each."""
        self._call.initial_metadata()
        # It returns for a failed call, too: one that found nobody, or that was cut before anybody answered.
        self._is_connected = not self._call.done() or self._call.code() not in _NO_ANSWER
        self._deadline = time.monotonic() + self._stall_seconds
        self._is_answered.set()
        for message in self._call:
            self._deadline = time.monotonic() + self._stall_seconds
            yield message

    def stop(self) -> None:
        """End the watch."""
        self._is_over.set()
        self._is_answered.set()

    def explain(self, address: str) -> KvTransferError:
        """Return what it means that the call failed."""
        if self._is_too_late and not self._is_connected:
            return ConnectError(f"{address}: no connection in {self._connect_seconds:g} s")
        if self._is_too_late:
            return StalledError(f"{address}: no byte in {self._stall_seconds:g} s")
        code, details = self._call.code(), self._call.details()
        if not self._is_connected and code is grpc.StatusCode.UNAVAILABLE:
            return ConnectError(f"{address}: {details}")
        return _ERROR_BY_STATUS.get(code, ProducerError)(f"{address}: {details or code}")

    def _run(self) -> None:
        if self._is_answered.wait(self._connect_seconds):
            while (remaining := self._deadline - time.monotonic()) > 0:
                if self._is_over.wait(remaining):
                    return
        if not self._is_over.is_set():
            self._is_too_late = True
            self._call.cancel()
