"""The producer's side of the wire: serves leased blocks of one worker process by `KvTransferService`.

It runs in threads of the engine's worker process, which owns the tensors. A stranger learns nothing: every token
that names no lease gets the same answer after the same wait, and the layout is compared only after the lease is
found. All limits are fixed at start, so no request can make the process hold much memory or many threads. Fetches
beyond their limit are refused at once, which leaves threads for releases and health checks.
"""

import logging
import threading
import zlib
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Final, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specserve_protos.v1alpha1 import kv_transfer_pb2 as pb
from specserve_protos.v1alpha1 import kv_transfer_pb2_grpc as pb_grpc
from specserve_workers.identity.channels import SERVER_OPTIONS, PeerGuard, ServerTls, server_credentials
from specserve_workers.kv.address import grpc_target
from specserve_workers.kv.blocks import KvBlocks
from specserve_workers.kv.errors import UnknownLeaseError
from specserve_workers.kv.layout import KvLayout, first_difference
from specserve_workers.kv.lease import LeaseTable, Pull
from specserve_workers.kv.stats import TransferCounters

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 1 << 20
_MAX_REQUEST_BYTES: Final = 1 << 20  # a layout of a thousand layers takes a tenth of it
_SHORT_RPCS: Final = 8
_NOT_FOUND_TEXT: Final = "unknown, spent or expired lease"
_SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["KvTransferService"].full_name


class KvServerError(RuntimeError):
    """The server cannot listen on its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one server gives to all its peers together.

    Attributes:
        max_streams: fetches at once, waiting ones included; one more is refused as RESOURCE_EXHAUSTED and spends
            no pull.
        max_waiting: of these, fetches waiting for a lease that is not known (yet).
        lease_wait_seconds: how long such a fetch waits: the worker hears of a new lease only with the engine's
            next step.
        chunk_bytes: bytes of a message; a chunk is whole blocks, at least one.
    """

    max_streams: int = 32
    max_waiting: int = 16
    lease_wait_seconds: float = 2.0
    chunk_bytes: int = CHUNK_BYTES


class KvTransferServicer(pb_grpc.KvTransferServiceServicer):
    """`KvTransferService` over the blocks of this process and its leases."""

    def __init__(
        self,
        *,
        blocks: KvBlocks,
        layout: KvLayout,
        leases: LeaseTable,
        counters: TransferCounters,
        limits: ServerLimits,
    ) -> None:
        self._blocks = blocks
        self._layout = layout
        self._leases = leases
        self._counters = counters
        self._limits = limits
        self._stream_slots = threading.BoundedSemaphore(limits.max_streams)
        self._waiting_slots = threading.BoundedSemaphore(limits.max_waiting)

    def Fetch(  # noqa: N802 - the name of the RPC
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchResponse]:
        """Stream a header and then the wanted blocks, layer by layer. It spends a pull however it ends."""
        # At once, so that the consumer can tell a slow producer from a dead one.
        context.send_initial_metadata(())
        if not self._stream_slots.acquire(blocking=False):
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._limits.max_streams} fetches are under way")
        try:
            pull = self._take(request.lease, context)
        except BaseException:
            self._stream_slots.release()
            raise
        # A stream that its client abandons is never resumed: then this callback ends the pull, not the finally.
        if not context.add_callback(lambda: self._end(pull)):
            self._end(pull)
            return
        try:
            yield from self._stream(request, pull, context)
        finally:
            self._end(pull)

    def Release(  # noqa: N802 - the name of the RPC
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        """Give up pulls, or the whole lease."""
        return pb.ReleaseResponse(released=self._leases.release(request.lease, pulls=request.pulls))

    def _end(self, pull: Pull) -> None:
        """Count a fetch as over and give its place back, once however often it is called."""
        if pull.end():
            self._stream_slots.release()

    def _take(self, token: bytes, context: grpc.ServicerContext) -> Pull:
        try:
            return self._leases.take(token)
        except UnknownLeaseError:
            pass
        if not self._waiting_slots.acquire(blocking=False):
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many fetches wait for a lease")
        try:
            return self._leases.take(token, wait_seconds=self._limits.lease_wait_seconds)
        except UnknownLeaseError:
            self._counters.add("bad_tokens")
            _abort(context, grpc.StatusCode.NOT_FOUND, _NOT_FOUND_TEXT)
        finally:
            self._waiting_slots.release()

    def _stream(
        self, request: pb.FetchRequest, pull: Pull, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchResponse]:
        difference = first_difference(self._layout, KvLayout.from_proto(request.layout))
        if difference is not None:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"KV layouts differ in {difference}")
        last_block = request.first_block + request.num_blocks
        if request.num_blocks < 1 or last_block > len(pull.lease.block_ids):
            _abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                f"blocks {request.first_block}..{last_block - 1} of {len(pull.lease.block_ids)}",
            )
        block_ids = pull.lease.block_ids[request.first_block : last_block]
        yield pb.FetchResponse(
            header=pb.FetchHeader(
                num_blocks=len(block_ids),
                prompt_tokens=pull.lease.prompt_tokens,
                prompt_sha256=pull.lease.prompt_sha256,
                total_bytes=len(block_ids) * self._layout.block_bytes,
            )
        )
        for layer_index, layer in enumerate(self._layout.layers):
            step = max(1, self._limits.chunk_bytes // layer.block_bytes)
            for offset in range(0, len(block_ids), step):
                try:
                    with pull.reading():
                        data = self._blocks.gather(layer_index, block_ids[offset : offset + step])
                except UnknownLeaseError:
                    _abort(context, grpc.StatusCode.NOT_FOUND, _NOT_FOUND_TEXT)
                yield pb.FetchResponse(
                    chunk=pb.LayerChunk(layer_index=layer_index, block_offset=offset, data=data, crc32=zlib.crc32(data))
                )
                self._counters.add("served_bytes", len(data))
        self._counters.add("served_transfers")


class _HealthServicer(health.HealthServicer):
    """Only `Check`, which is short: a `Watch` takes one of the RPCs for as long as its client likes."""

    def __init__(self) -> None:
        super().__init__(experimental_non_blocking=False)

    def Watch(  # noqa: N802 - the name of the RPC
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.ServicerContext,
        send_response_callback: object = None,
    ) -> NoReturn:
        _abort(context, grpc.StatusCode.UNIMPLEMENTED, "only Check is served")


class KvTransferServer:
    """A gRPC server for `KvTransferServicer` and the standard health service (`Check` only).

    Args:
        host, port: where to listen. Port 0 takes a free one: see `port`.
        tls: certificates, and who may call; None serves everybody, in plaintext.
    """

    def __init__(
        self,
        servicer: KvTransferServicer,
        *,
        host: str,
        port: int,
        limits: ServerLimits,
        tls: ServerTls | None = None,
    ) -> None:
        # The servicer holds fetches to `max_streams`. The rest is for calls that are short: releases, health checks
        # and fetches that are refused.
        rpcs = limits.max_streams + _SHORT_RPCS
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=rpcs, thread_name_prefix="specserve-kv-serve"),
            maximum_concurrent_rpcs=rpcs,
            interceptors=[] if tls is None else [PeerGuard(tls.rule)],
            options=[
                ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", rpcs),
                ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
                ("grpc.keepalive_time_ms", 5_000),  # finds consumers whose machine is gone
                ("grpc.keepalive_timeout_ms", 5_000),
                *(() if tls is None else SERVER_OPTIONS),
            ],
        )
        pb_grpc.add_KvTransferServiceServicer_to_server(servicer, self._server)
        health_servicer = _HealthServicer()
        for service in ("", _SERVICE_NAME):
            health_servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, self._server)
        # New connections ask it for their certificates for as long as there is a server.
        self._credentials = None if tls is None else server_credentials(tls.source)
        self.port = self._listen(host, port, self._credentials)

    def start(self) -> None:
        """Start to serve."""
        self._server.start()

    def stop(self, *, grace_seconds: float = 0.0) -> None:
        """Stop to accept, cut what still runs after `grace_seconds`, and wait for the end."""
        self._server.stop(grace_seconds or None).wait(grace_seconds + 5.0)

    def _listen(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        target = grpc_target(host, port)
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(target))
            return int(self._server.add_secure_port(target, credentials))
        except RuntimeError as error:
            raise KvServerError(f"KV server cannot listen on {target}: {error}") from None


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("unreachable: abort raises")
