"""Calls that gRPC never completes, not even once they are cancelled: the consumer waits for none beyond its limits."""

import gc
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

import grpc
import pytest

from specserve_protos.v1alpha1 import kv_transfer_pb2 as pb
from specserve_workers.kv import client as client_module
from specserve_workers.kv.client import Cancellation, FetchOrder, KvClient
from specserve_workers.kv.errors import ConnectError, StalledError, TransferCancelledError
from specserve_workers.kv.puller import Puller
from tests.fakes.waiting import wait_until

Make = Callable[..., Any]
ADDRESS = "peer:1"
LEASE = b"\1" * 16
PROMPT_SHA256 = b"\5" * 32
BLOCK_BYTES = 8192
LONG_MS = 60_000
ORDER = FetchOrder(
    address=ADDRESS,
    lease=LEASE,
    first_block=0,
    block_ids=tuple(range(20)),
    prompt_tokens=640,
    prompt_sha256=PROMPT_SHA256,
)


class Part:
    """A message, counted while anybody holds it."""

    alive = 0

    def __init__(self, message: pb.FetchResponse) -> None:
        self._message = message
        Part.alive += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def __del__(self) -> None:
        Part.alive -= 1


def right_parts() -> Iterator[Part]:
    """A header and all blocks of the first of three layers, a block in each message."""
    total_bytes = 20 * (2 * BLOCK_BYTES + 4096)
    yield Part(
        pb.FetchResponse(
            header=pb.FetchHeader(
                num_blocks=20, prompt_tokens=640, prompt_sha256=PROMPT_SHA256, total_bytes=total_bytes
            )
        )
    )
    for offset in range(20):
        data = bytes([offset + 1]) * BLOCK_BYTES
        chunk = pb.LayerChunk(layer_index=0, block_offset=offset, data=data, crc32=zlib.crc32(data))
        yield Part(pb.FetchResponse(chunk=chunk))


class DeadCall:
    """Answers or not, hands over some messages, and then blocks whoever asks it, until the test is over."""

    def __init__(self, *, answers: bool, num_parts: int = 0) -> None:
        self._answers = answers
        self._parts = right_parts()
        self._num_parts_left = num_parts
        self.num_read = 0
        self.test_is_over = threading.Event()
        self.is_waited_for = threading.Event()
        self.is_cancelled = threading.Event()

    def initial_metadata(self) -> tuple[()]:
        if not self._answers:
            self._block()
        return ()

    def done(self) -> bool:
        return False

    def code(self) -> NoReturn:
        self._block()

    details = code

    def cancel(self) -> bool:
        self.is_cancelled.set()
        return True

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        if not self._num_parts_left:
            self._block()
        self._num_parts_left -= 1
        self.num_read += 1
        return next(self._parts)

    def result(self, timeout: float | None = None) -> pb.ReleaseResponse:
        self.test_is_over.wait(timeout)
        raise grpc.FutureTimeoutError

    def _block(self) -> NoReturn:
        self.is_waited_for.set()
        self.test_is_over.wait()
        raise RuntimeError("the test is over")


class DeadChannel:
    """All its calls are `call`; closing it waits for their end, as that of a real one does."""

    def __init__(self, call: DeadCall) -> None:
        self.call = call
        self.is_closing = threading.Event()

    def unary_stream(self, *_: Any, **__: Any) -> Callable[..., DeadCall]:
        return lambda *_, **__: self.call

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        call = self.call

        class Method:
            def __call__(self, *_: Any, **__: Any) -> None:
                call._block()

            def future(self, *_: Any, **__: Any) -> DeadCall:
                return call

        return Method()

    def close(self) -> None:
        self.is_closing.set()
        self.call.test_is_over.wait()


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DeadChannel]]:
    """Make every channel one whose calls are the given one."""
    made: list[DeadChannel] = []

    def make(*, answers: bool, num_parts: int = 0) -> DeadChannel:
        channel = DeadChannel(DeadCall(answers=answers, num_parts=num_parts))
        monkeypatch.setattr(grpc, "insecure_channel", lambda *_, **__: channel)
        made.append(channel)
        return channel

    before = set(threading.enumerate())
    yield make
    for channel in made:
        channel.call.test_is_over.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def start(call: Callable[[], Any]) -> "Future[Any]":
    """Run it in a thread of its own, so that one which hangs fails its test and no more."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def no_part_is_held() -> bool:
    gc.collect()  # an exception and the frames that it went through hold each other
    return Part.alive == 0


def test_call_without_an_answer_is_no_connection(make_consumer: Make, connect: Make) -> None:
    channel = connect(answers=False)
    client = make_consumer(connect_timeout_ms=200, stall_timeout_ms=LONG_MS).client
    began = time.monotonic()
    with pytest.raises(ConnectError, match=r"peer:1: no connection in 0\.2 s"):
        start(lambda: client.fetch(ORDER)).result(10)
    assert 0.15 <= time.monotonic() - began < 5
    assert channel.call.is_cancelled.is_set()
    assert channel.is_closing.wait(10)


@pytest.mark.parametrize("num_parts", [0, 1, 3, 21])
def test_call_that_ends_after_its_answer_is_stalled(make_consumer: Make, connect: Make, num_parts: int) -> None:
    channel = connect(answers=True, num_parts=num_parts)
    client = make_consumer(connect_timeout_ms=LONG_MS, stall_timeout_ms=200).client
    began = time.monotonic()
    with pytest.raises(StalledError, match=r"peer:1: no byte in 0\.2 s"):
        start(lambda: client.fetch(ORDER)).result(10)
    assert 0.15 <= time.monotonic() - began < 5
    assert channel.call.num_read == num_parts
    assert channel.call.is_cancelled.is_set()
    assert channel.is_closing.wait(10)


@pytest.mark.parametrize(("answers", "num_parts"), [(False, 0), (True, 0), (True, 2)])
def test_cancellation_is_not_left_to_the_call(
    make_consumer: Make, connect: Make, *, answers: bool, num_parts: int
) -> None:
    channel = connect(answers=answers, num_parts=num_parts)
    client = make_consumer(connect_timeout_ms=LONG_MS, stall_timeout_ms=LONG_MS).client
    cancellation = Cancellation()
    fetch = start(lambda: client.fetch(ORDER, cancellation=cancellation))
    assert channel.call.is_waited_for.wait(10)
    cancellation.cancel()
    with pytest.raises(TransferCancelledError, match=ADDRESS):
        fetch.result(5)
    assert channel.call.is_cancelled.is_set()


def test_next_fetch_takes_another_connection(make_consumer: Make, connect: Make) -> None:
    connect(answers=False)
    client = make_consumer(connect_timeout_ms=100, stall_timeout_ms=LONG_MS).client
    with pytest.raises(ConnectError):
        start(lambda: client.fetch(ORDER)).result(10)
    other = connect(answers=False)
    with pytest.raises(ConnectError):
        start(lambda: client.fetch(ORDER)).result(10)
    assert other.call.is_cancelled.is_set()


def test_reader_holds_no_message_while_it_waits_for_the_next(make_consumer: Make, connect: Make) -> None:
    connect(answers=True, num_parts=3)
    client = make_consumer(connect_timeout_ms=LONG_MS, stall_timeout_ms=100).client
    with pytest.raises(StalledError):
        start(lambda: client.fetch(ORDER)).result(10)
    wait_until(no_part_is_held)


def test_messages_that_nobody_will_take_are_dropped(make_consumer: Make, connect: Make) -> None:
    channel = connect(answers=True, num_parts=4)
    consumer = make_consumer(connect_timeout_ms=LONG_MS, stall_timeout_ms=LONG_MS)

    def fail_late(*_: Any) -> None:
        assert channel.call.is_waited_for.wait(10)
        raise MemoryError

    consumer.client._blocks.scatter = fail_late
    with pytest.raises(MemoryError):
        start(lambda: consumer.client.fetch(ORDER)).result(10)
    wait_until(no_part_is_held)


def test_reader_is_few_messages_ahead_and_ends_with_the_fetch(make_consumer: Make, connect: Make) -> None:
    channel = connect(answers=True, num_parts=21)
    consumer = make_consumer(connect_timeout_ms=LONG_MS, stall_timeout_ms=LONG_MS)
    may_go_on = threading.Event()

    def fail_late(*_: Any) -> None:
        assert may_go_on.wait(10)
        raise MemoryError

    consumer.client._blocks.scatter = fail_late
    fetch = start(lambda: consumer.client.fetch(ORDER))
    most = 2 + client_module._READ_AHEAD + 1  # the header and the block that is written, those queued, one in hand
    wait_until(lambda: channel.call.num_read == most)
    may_go_on.set()
    with pytest.raises(MemoryError):
        fetch.result(10)
    del fetch
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "specserve-kv-read"])
    assert channel.call.num_read == most
    wait_until(no_part_is_held)


def test_messages_that_wait_to_be_written_are_no_silence(make_consumer: Make, connect: Make) -> None:
    channel = connect(answers=True, num_parts=21)
    consumer = make_consumer(connect_timeout_ms=LONG_MS, stall_timeout_ms=200)
    write = consumer.client._blocks.scatter
    first = threading.Event()

    def write_first_slowly(*args: Any) -> None:
        if not first.is_set():
            first.set()
            assert not channel.call.is_cancelled.wait(0.5)
        write(*args)

    consumer.client._blocks.scatter = write_first_slowly
    with pytest.raises(StalledError):
        start(lambda: consumer.client.fetch(ORDER)).result(10)
    assert channel.call.num_read == 21
    assert consumer.cache["layer.0"][19].any()


def test_reader_that_fails_ends_the_fetch_with_its_error(make_consumer: Make, connect: Make) -> None:
    channel = connect(answers=True)

    def fail() -> None:
        raise ValueError("no such call")

    channel.call.initial_metadata = fail
    client = make_consumer(connect_timeout_ms=LONG_MS, stall_timeout_ms=LONG_MS).client
    with pytest.raises(ValueError, match="no such call"):
        start(lambda: client.fetch(ORDER)).result(10)


def test_release_is_given_up_after_its_limit(
    make_consumer: Make, connect: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = connect(answers=False)
    monkeypatch.setattr(client_module, "_RELEASE_TIMEOUT_SECONDS", 0.1)
    client = make_consumer().client
    assert start(lambda: client.release(ADDRESS, LEASE, pulls=1)).result(10) is False
    assert channel.call.is_cancelled.is_set()
    assert channel.is_closing.wait(10)


def test_closing_the_puller_waits_for_no_call(
    make_consumer: Make, connect: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = connect(answers=False)
    monkeypatch.setattr(client_module, "_RELEASE_TIMEOUT_SECONDS", 0.1)
    client: KvClient = make_consumer(connect_timeout_ms=LONG_MS, stall_timeout_ms=LONG_MS).client
    puller = Puller(client, num_threads=1)
    puller.submit("running", ORDER)
    puller.release(ADDRESS, LEASE)
    assert channel.call.is_waited_for.wait(10)
    start(puller.close).result(10)
    assert [pull.request_id for pull in puller.pop_ended()] == ["running"]
