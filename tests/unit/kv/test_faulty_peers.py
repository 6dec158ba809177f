"""A producer that is dead, hung or wrong: the consumer notices, names the cause, and is not held up."""

import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specserve_protos.v1alpha1 import kv_transfer_pb2 as pb
from specserve_protos.v1alpha1 import kv_transfer_pb2_grpc as pb_grpc
from specserve_workers.kv.client import Cancellation, FetchOrder, KvClient
from specserve_workers.kv.errors import (
    ChecksumError,
    ConnectError,
    KvTransferError,
    ProducerError,
    PromptMismatchError,
    ProtocolError,
    StalledError,
    TransferCancelledError,
)

Make = Callable[..., Any]
Edit = Callable[[list[pb.FetchResponse]], list[pb.FetchResponse]]
PROMPT_SHA256 = b"\5" * 32
BLOCK_BYTES = {0: 8192, 1: 8192, 2: 4096}


def right_answer() -> list[pb.FetchResponse]:
    """What an honest producer sends for two blocks."""
    header = pb.FetchHeader(
        num_blocks=2, prompt_tokens=60, prompt_sha256=PROMPT_SHA256, total_bytes=2 * (2 * 8192 + 4096)
    )
    messages = [pb.FetchResponse(header=header)]
    for layer_index, block_bytes in BLOCK_BYTES.items():
        for offset in (0, 1):
            data = bytes([layer_index + 1]) * block_bytes
            chunk = pb.LayerChunk(layer_index=layer_index, block_offset=offset, data=data, crc32=zlib.crc32(data))
            messages.append(pb.FetchResponse(chunk=chunk))
    return messages


class Scripted(pb_grpc.KvTransferServiceServicer):
    """Sends what it is given."""

    def __init__(self, messages: list[pb.FetchResponse], *, failure: Exception | None = None) -> None:
        self._messages = messages
        self._failure = failure

    def Fetch(self, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchResponse]:
        yield from self._messages
        if self._failure is not None:
            raise self._failure


class Hung(pb_grpc.KvTransferServiceServicer):
    """Sends some messages and then nothing, until it is let go."""

    def __init__(self, messages: list[pb.FetchResponse]) -> None:
        self._messages = messages
        self.let_go = threading.Event()

    def Fetch(self, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchResponse]:
        context.send_initial_metadata(())
        context.add_callback(self.let_go.set)
        yield from self._messages
        self.let_go.wait(30)


def fetch(client: KvClient, address: str, **kwargs: Any) -> int:
    order = FetchOrder(
        address=address,
        lease=b"\1" * 16,
        first_block=0,
        block_ids=(3, 5),
        prompt_tokens=60,
        prompt_sha256=PROMPT_SHA256,
    )
    return client.fetch(order, **kwargs)


def test_right_answer_is_accepted(consumer: Any, serve: Make) -> None:
    assert fetch(consumer.client, serve(Scripted(right_answer()))) == 2 * (2 * 8192 + 4096)
    assert consumer.cache["layer.1"][3].any()


def edit_chunk(index: int, **changes: Any) -> Edit:
    def edit(messages: list[pb.FetchResponse]) -> list[pb.FetchResponse]:
        for name, value in changes.items():
            setattr(messages[index].chunk, name, value)
        return messages

    return edit


def edit_header(**changes: Any) -> Edit:
    def edit(messages: list[pb.FetchResponse]) -> list[pb.FetchResponse]:
        for name, value in changes.items():
            setattr(messages[0].header, name, value)
        return messages

    return edit


def flip_one_bit(messages: list[pb.FetchResponse]) -> list[pb.FetchResponse]:
    data = bytearray(messages[4].chunk.data)
    data[1234] ^= 0x10
    messages[4].chunk.data = bytes(data)
    return messages


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (flip_one_bit, ChecksumError),
        (edit_chunk(3, crc32=0), ChecksumError),
        (edit_header(prompt_tokens=61), PromptMismatchError),
        (edit_header(prompt_sha256=b"\6" * 32), PromptMismatchError),
        (edit_header(num_blocks=3), ProtocolError),
        (edit_header(total_bytes=1), ProtocolError),
        (edit_chunk(1, layer_index=2), ProtocolError),
        (edit_chunk(1, layer_index=2**32 - 1), ProtocolError),
        (edit_chunk(1, block_offset=1), ProtocolError),
        (edit_chunk(2, data=b"\1" * 8191), ProtocolError),
        (edit_chunk(2, data=b""), ProtocolError),
        (edit_chunk(2, data=b"\1" * 8192 * 2), ProtocolError),
        (lambda m: m[:-1], ProtocolError),
        (lambda m: m[:3], ProtocolError),
        (lambda m: m[:1], ProtocolError),
        (lambda m: [], ProtocolError),
        (lambda m: m[1:], ProtocolError),
        (lambda m: [*m, m[-1]], ProtocolError),
        (lambda m: [m[0], *m], ProtocolError),
        (lambda m: [*m[:2], m[1], *m[2:]], ProtocolError),
        (lambda m: [*m[:1], m[2], m[1], *m[3:]], ProtocolError),
        (lambda m: [*m[:2], pb.FetchResponse(), *m[2:]], ProtocolError),
    ],
)
def test_wrong_answer_is_refused(consumer: Any, serve: Make, edit: Edit, kind: type[KvTransferError]) -> None:
    with pytest.raises(kind):
        fetch(consumer.client, serve(Scripted(edit(right_answer()))))


def test_failure_of_the_producer_is_named_so(consumer: Any, serve: Make) -> None:
    address = serve(Scripted(right_answer()[:3], failure=OSError("no")))
    with pytest.raises(ProducerError, match=address):
        fetch(consumer.client, address)


@pytest.mark.parametrize("num_messages", [0, 1, 3, 7])
def test_silence_is_cut_after_the_stall_timeout(make_consumer: Make, serve: Make, num_messages: int) -> None:
    consumer = make_consumer(stall_timeout_ms=300)
    servicer = Hung(right_answer()[:num_messages])
    began = time.monotonic()
    with pytest.raises(StalledError):
        fetch(consumer.client, serve(servicer))
    assert 0.25 <= time.monotonic() - began < 4
    assert servicer.let_go.wait(10), "the producer is not told"


def test_slow_but_steady_transfer_has_no_limit(make_consumer: Make, serve: Make) -> None:
    class Slow(Scripted):
        def Fetch(self, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchResponse]:
            for message in self._messages:
                threading.Event().wait(0.15)
                yield message

    consumer = make_consumer(stall_timeout_ms=600)  # the whole takes 1 s
    assert fetch(consumer.client, serve(Slow(right_answer()))) > 0


def test_nobody_listening_is_found_out_at_once(make_consumer: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    consumer = make_consumer(connect_timeout_ms=20_000)
    began = time.monotonic()
    with pytest.raises(ConnectError, match=f"127.0.0.1:{port}"):
        fetch(consumer.client, f"127.0.0.1:{port}")
    assert time.monotonic() - began < 10


def test_peer_that_accepts_and_says_nothing_is_cut_after_the_connect_timeout(make_consumer: Make) -> None:
    consumer = make_consumer(connect_timeout_ms=200)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = time.monotonic()
        with pytest.raises(ConnectError):
            fetch(consumer.client, f"127.0.0.1:{listener.getsockname()[1]}")
        assert 0.15 <= time.monotonic() - began < 10


def test_peer_that_speaks_another_protocol_is_a_failed_connection(make_consumer: Make) -> None:
    consumer = make_consumer(connect_timeout_ms=500)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(ConnectError):
            fetch(consumer.client, f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_restarted_producer_is_found_at_once(make_producer: Make, consumer: Any, order_for: Make) -> None:
    first = make_producer()
    lease = first.hold()
    consumer.client.fetch(order_for(first, lease))
    port = first.server.port
    first.server.stop()
    with pytest.raises(KvTransferError):
        consumer.client.fetch(order_for(first, lease))
    second = make_producer(port=port)
    assert consumer.client.fetch(order_for(second, second.hold())) > 0


def test_producer_that_dies_in_the_middle_is_a_producer_error(
    make_producer: Make, consumer: Any, serve: Make, order_for: Make
) -> None:
    servicer = Hung(right_answer()[:3])
    address = serve(servicer)
    # The connection is cut from the producer's side while the consumer waits for more.
    thread = threading.Timer(0.3, servicer.let_go.set)
    thread.start()
    with pytest.raises((ProducerError, ProtocolError)):
        fetch(consumer.client, address)
    thread.join()


def test_cancelled_fetch_ends_at_once(consumer: Any, serve: Make) -> None:
    cancellation = Cancellation()
    thread = threading.Timer(0.2, cancellation.cancel)
    thread.start()
    with pytest.raises(TransferCancelledError):
        fetch(consumer.client, serve(Hung(right_answer()[:2])), cancellation=cancellation)
    thread.join()


def test_closed_client_refuses(consumer: Any, serve: Make) -> None:
    consumer.client.close()
    with pytest.raises(ConnectError, match="shutting down"):
        fetch(consumer.client, serve(Scripted(right_answer())))


def test_release_of_a_dead_peer_is_no_error(make_consumer: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert make_consumer(connect_timeout_ms=500).client.release(address, b"\1" * 16, pulls=1) is False
