"""The consumer's side of the wire: fetches leased blocks into this process' tensors.

A transfer has a limit on connecting and a limit on silence, but none on its length. Chunks must come in the one
order the protocol allows, so nothing can be missing, twice or elsewhere in a transfer that ends well.

gRPC may never complete a call, not even a cancelled one: this was seen of a call made while its connection was shut
down. So each call is read by a thread of its own, and nobody else waits for gRPC without a limit of their own.
"""

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeAlias

import grpc

from specserve_protos.v1alpha1 import kv_transfer_pb2 as pb
from specserve_protos.v1alpha1 import kv_transfer_pb2_grpc as pb_grpc
from specserve_workers.identity.channels import PeerTls
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

_READ_AHEAD: Final = 4  # messages of one transfer that wait to be written
_RELEASE_TIMEOUT_SECONDS: Final = 2.0
_RELEASE_GRACE_SECONDS: Final = 0.5  # for gRPC to report the timeout itself
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
        tls: of the producers; None connects in plaintext.
    """

    def __init__(
        self,
        *,
        blocks: KvBlocks,
        layout: KvLayout,
        connect_timeout_ms: int,
        stall_timeout_ms: int,
        tls: PeerTls | None = None,
    ) -> None:
        self._blocks = blocks
        self._layout = layout
        self._layout_message = layout.to_proto()
        self._connect_seconds = connect_timeout_ms / 1000
        self._stall_seconds = stall_timeout_ms / 1000
        self._channels = ChannelPool(tls=tls)

    def fetch(self, order: FetchOrder, *, cancellation: Cancellation | None = None) -> int:
        """Fetch all wanted blocks of all layers into their places and return their bytes.

        Raises a subclass of `KvTransferError`; then some blocks may have been written, and all are to be
        regarded as void.
        """
        cancellation = cancellation or Cancellation()
        if cancellation.is_cancelled:
            raise TransferCancelledError("cancelled before it started")
        inbox = _Inbox()
        cancellation.attach(inbox.close)
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
            try:
                return self._receive(self._each_message(call, inbox, order.address), order)
            finally:
                inbox.close()
                call.cancel()

    def release(self, address: str, lease: bytes, *, pulls: int) -> bool:
        """Give up pulls (0: all) of a lease. Best effort: a failure is logged, and the lease then expires."""
        try:
            with self._channels.channel(address) as channel:
                stub = pb_grpc.KvTransferServiceStub(channel)
                request = pb.ReleaseRequest(lease=lease, pulls=pulls)
                call = stub.Release.future(request, timeout=_RELEASE_TIMEOUT_SECONDS)
                try:
                    return bool(call.result(timeout=_RELEASE_TIMEOUT_SECONDS + _RELEASE_GRACE_SECONDS).released)
                finally:
                    call.cancel()
        except (KvTransferError, grpc.RpcError, grpc.FutureTimeoutError) as error:
            logger.info("KV lease at %s not released, it will expire: %r", address, error)
            return False

    def close(self) -> None:
        """Start no more; what is under way goes on to its end."""
        self._channels.close()

    def _each_message(self, call: Any, inbox: "_Inbox", address: str) -> Iterator[pb.FetchResponse]:
        """Have the call read, and pass its messages on. Raises what it means that there are no more."""
        reader = threading.Thread(target=_read, args=(call, inbox, address), name="specserve-kv-read", daemon=True)
        deadline = time.monotonic() + self._connect_seconds
        is_answered = False
        reader.start()
        while True:
            try:
                item = inbox.take(deadline)
            except TimeoutError:
                if not is_answered:
                    raise ConnectError(f"{address}: no connection in {self._connect_seconds:g} s") from None
                raise StalledError(f"{address}: no byte in {self._stall_seconds:g} s") from None
            except _InboxClosedError:
                raise TransferCancelledError(f"{address}: cancelled") from None
            if item is _Mark.END:
                return
            if isinstance(item, Exception):
                raise item
            is_answered = True
            deadline = time.monotonic() + self._stall_seconds
            if item is not _Mark.ANSWERED:
                yield item

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
                data = chunk.data  # a copy each time it is asked for
                count, rest = divmod(len(data), layer.block_bytes)
                if (
                    (chunk.layer_index, chunk.block_offset) != (layer_index, offset)
                    or rest
                    or not 1 <= count <= len(order.block_ids) - offset
                ):
                    raise ProtocolError(f"{order.address}: chunk out of order in layer {layer.name}")
                if zlib.crc32(data) != chunk.crc32:
                    raise ChecksumError(f"{order.address}: damaged chunk in layer {layer.name}, block {offset}")
                self._blocks.scatter(layer_index, order.block_ids[offset : offset + count], data)
                offset += count
                received_bytes += len(data)
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


class _Mark(Enum):
    """What a reader hands over besides messages and errors."""

    ANSWERED = auto()
    END = auto()


_Item: TypeAlias = "pb.FetchResponse | _Mark | Exception"


class _InboxClosedError(Exception):
    """The fetch was given up."""


class _Inbox:
    """What the reader of a call hands to its fetch, in order. Either side waits here for the other, never for gRPC."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: deque[_Item] = deque()
        self._is_closed = False

    def put(self, item: _Item) -> bool:
        """Add an item, waiting for room. False: nobody wants it, nor any after it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < _READ_AHEAD)
            if not self._is_closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._is_closed

    def take(self, deadline: float) -> _Item:
        """Return the next item. Raises TimeoutError if there is none by then, and `_InboxClosedError`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._items, deadline - time.monotonic())
            if self._is_closed:
                raise _InboxClosedError
            if not self._items:
                raise TimeoutError
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """Let both sides go at once, and drop what was not taken."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


def _read(call: Any, inbox: _Inbox, address: str) -> None:
    """Put what comes of a call into the inbox: `ANSWERED`, messages, and `END` or the error.

    The producer answers with its metadata as soon as it sees the call.
    """
    is_answered = False
    last: _Item = _Mark.END
    try:
        call.initial_metadata()
        # It returns for a failed call, too: one that found nobody, or that was cut before anybody answered.
        is_answered = not call.done() or call.code() not in _NO_ANSWER
        if is_answered:
            inbox.put(_Mark.ANSWERED)
        for message in call:
            if not inbox.put(message):
                return
            del message  # it would stay in memory until the next comes
    except grpc.RpcError:
        last = _explain(call, address, is_answered=is_answered)
    except Exception as error:
        last = error
    inbox.put(last)


def _explain(call: Any, address: str, *, is_answered: bool) -> KvTransferError:
    """Return what it means that the call failed."""
    code, details = call.code(), call.details()
    if not is_answered and code is grpc.StatusCode.UNAVAILABLE:
        return ConnectError(f"{address}: {details}")
    return _ERROR_BY_STATUS.get(code, ProducerError)(f"{address}: {details or code}")
