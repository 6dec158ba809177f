"""Faults of KV transfer: the real servicer, led astray where the behaviour says so."""

import time
import zlib
from collections.abc import Iterator
from typing import Any, Final

import grpc

from specserve_protos.v1alpha1 import kv_transfer_pb2
from specserve_workers.kv.server import KvTransferServicer
from tests.fakes.engine.behaviour import LiveBehaviour

_BY_ORDER: Final = "by order"


class SteeredKvServicer(KvTransferServicer):
    """`KvTransferServicer` with its faults."""

    def __init__(self, *args: Any, behaviour: LiveBehaviour, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._behaviour = behaviour

    def Fetch(
        self, request: kv_transfer_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[kv_transfer_pb2.FetchResponse]:
        if self._behaviour.now.kv_refuse:
            context.abort(grpc.StatusCode[self._behaviour.now.kv_refuse], _BY_ORDER)
        for message in super().Fetch(request, context):
            if message.WhichOneof("part") == "chunk":
                time.sleep(self._behaviour.now.kv_delay_ms / 1000)
                corrupt(message.chunk, self._behaviour.now.kv_corrupt)
            yield message


def corrupt(chunk: kv_transfer_pb2.LayerChunk, how: str) -> None:
    """Changes the first byte of a chunk; after "content" its checksum is right all the same."""
    if how:
        chunk.data = bytes([chunk.data[0] ^ 0xFF]) + chunk.data[1:]
        if how == "content":
            chunk.crc32 = zlib.crc32(chunk.data)
