"""Blocks cross the wire whole, and a lease ends as it should, whatever the consumer does."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specserve_protos.v1alpha1 import kv_transfer_pb2 as pb
from specserve_protos.v1alpha1 import kv_transfer_pb2_grpc as pb_grpc
from specserve_workers.kv.errors import (
    KvTransferError,
    LayoutMismatchError,
    ProducerBusyError,
    ProtocolError,
    TransferCause,
    UnknownLeaseError,
)
from specserve_workers.kv.server import KvServerError, ServerLimits
from tests.fakes.waiting import wait_until

Make = Callable[..., Any]


def test_all_layers_arrive_and_the_lease_ends(producer: Any, consumer: Any, order_for: Make) -> None:
    lease = producer.hold((5, 6, 2, 9))
    num_bytes = consumer.client.fetch(order_for(producer, lease, (1, 4, 3, 0)))
    for name, source in producer.cache.items():
        assert torch.equal(consumer.cache[name][[1, 4, 3, 0]], source[[5, 6, 2, 9]])
        assert not consumer.cache[name][5:].any()
    assert num_bytes == 4 * producer.layout.block_bytes
    wait_until(producer.leases.has_ended)
    assert producer.leases.pop_ended() == {"r"}
    assert producer.counters.to_dict() == {
        "loaded_bytes": 0,
        "served_transfers": 1,
        "served_bytes": num_bytes,
        "bad_tokens": 0,
    }


def test_only_the_wanted_blocks_are_sent(producer: Any, consumer: Any, order_for: Make) -> None:
    lease = producer.hold((5, 6, 2, 9))
    num_bytes = consumer.client.fetch(order_for(producer, lease, (7, 8), first_block=1))
    assert num_bytes == 2 * producer.layout.block_bytes
    assert torch.equal(consumer.cache["layer.2"][[7, 8]], producer.cache["layer.2"][[6, 2]])
    assert not consumer.cache["layer.2"][:7].any()


def test_every_pull_of_a_lease_gets_the_blocks(producer: Any, consumer: Any, order_for: Make) -> None:
    lease = producer.hold(pulls=3)
    for start in (0, 4, 8):
        consumer.client.fetch(order_for(producer, lease, tuple(range(start, start + 4))))
        assert torch.equal(consumer.cache["layer.0"][start : start + 4], producer.cache["layer.0"][[5, 6, 2, 9]])
    with pytest.raises(UnknownLeaseError):
        consumer.client.fetch(order_for(producer, lease))


def test_fetch_waits_for_a_lease_that_is_granted_a_moment_later(
    make_producer: Make, consumer: Any, order_for: Make
) -> None:
    producer = make_producer(limits=ServerLimits(lease_wait_seconds=30))
    lease = producer.hold()
    producer.leases.release(lease.token)
    thread = threading.Timer(0.1, producer.leases.grant, [lease])
    thread.start()
    assert consumer.client.fetch(order_for(producer, lease)) > 0
    thread.join()


def test_unknown_token_is_refused_and_counted(producer: Any, consumer: Any, order_for: Make) -> None:
    lease = producer.hold()
    producer.leases.release(lease.token)
    with pytest.raises(UnknownLeaseError) as caught:
        consumer.client.fetch(order_for(producer, lease))
    assert caught.value.cause is TransferCause.UNKNOWN_LEASE
    assert producer.counters.to_dict()["bad_tokens"] == 1
    assert consumer.is_untouched()


def test_other_layout_is_refused_with_the_field_named(producer: Any, make_consumer: Make, order_for: Make) -> None:
    consumer = make_consumer(instruction_set="amx/LBHNC")
    lease = producer.hold()
    with pytest.raises(LayoutMismatchError, match="instruction_set: 'vec/LBHNC' on the producer, 'amx/LBHNC'"):
        consumer.client.fetch(order_for(producer, lease))
    wait_until(producer.leases.has_ended)  # such a consumer does not come back


def test_layout_is_not_told_to_who_has_no_lease(producer: Any, make_consumer: Make, order_for: Make) -> None:
    consumer = make_consumer(dtype="float32")
    lease = producer.hold()
    producer.leases.release(lease.token)
    with pytest.raises(UnknownLeaseError):
        consumer.client.fetch(order_for(producer, lease))


def test_blocks_beyond_the_prompt_are_refused(producer: Any, consumer: Any, order_for: Make) -> None:
    lease = producer.hold((5, 6))
    with pytest.raises(ProtocolError, match=r"1\.\.2 of 2"):
        consumer.client.fetch(order_for(producer, lease, (0, 1), first_block=1))


def test_released_lease_ends_at_once(producer: Any, consumer: Any) -> None:
    lease = producer.hold(pulls=4)
    assert consumer.client.release(producer.address, lease.token, pulls=0)
    assert producer.leases.pop_ended() == {"r"}
    assert not consumer.client.release(producer.address, lease.token, pulls=0)


def test_release_of_one_pull_leaves_the_others(producer: Any, consumer: Any, order_for: Make) -> None:
    lease = producer.hold(pulls=2)
    assert consumer.client.release(producer.address, lease.token, pulls=1)
    assert consumer.client.fetch(order_for(producer, lease)) > 0
    wait_until(producer.leases.has_ended)


def test_client_that_goes_away_in_the_middle_spends_its_pull(make_producer: Make) -> None:
    producer = make_producer(limits=ServerLimits(chunk_bytes=8192))
    lease = producer.hold(tuple(range(24)), pulls=2)
    with grpc.insecure_channel(producer.address) as channel:
        call = pb_grpc.KvTransferServiceStub(channel).Fetch(
            pb.FetchRequest(lease=lease.token, layout=producer.layout.to_proto(), num_blocks=24)
        )
        next(call)
        call.cancel()
    assert producer.leases.open_count == 1
    producer.leases.release(lease.token, pulls=1)
    wait_until(producer.leases.has_ended)
    assert producer.leases.pop_ended() == {"r"}


def test_client_that_stops_reading_cannot_hold_blocks_beyond_the_lease(make_producer: Make) -> None:
    # More than the connection buffers, so the server waits for the client.
    producer = make_producer(limits=ServerLimits(chunk_bytes=8192), lease_seconds=0.3)
    lease = producer.hold(tuple(range(24)) * 40)
    with grpc.insecure_channel(producer.address) as channel:
        call = pb_grpc.KvTransferServiceStub(channel).Fetch(
            pb.FetchRequest(lease=lease.token, layout=producer.layout.to_proto(), num_blocks=24 * 40)
        )
        next(call)

        def is_over() -> bool:
            producer.leases.expire()
            return producer.leases.has_ended()

        wait_until(is_over)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_more_waiting_fetches_than_allowed_are_refused(make_producer: Make, consumer: Any, order_for: Make) -> None:
    producer = make_producer(limits=ServerLimits(lease_wait_seconds=30, max_waiting=1))
    lease = producer.hold()
    producer.leases.release(lease.token)
    with grpc.insecure_channel(producer.address) as channel:
        waiting = pb_grpc.KvTransferServiceStub(channel).Fetch(pb.FetchRequest(lease=b"\1" * 16))
        waiting.initial_metadata()
        with pytest.raises(ProducerBusyError):
            # The first one has answered with its metadata just before it takes the only place.
            wait_until(lambda: consumer.client.fetch(order_for(producer, lease)))
        waiting.cancel()
        producer.leases.close()


def test_more_fetches_than_allowed_are_refused_while_releases_go_on(
    make_producer: Make, consumer: Any, order_for: Make
) -> None:
    producer = make_producer(limits=ServerLimits(max_streams=2, chunk_bytes=8192))
    many = producer.hold(tuple(range(24)) * 40, pulls=2, request_id="many")
    lease = producer.hold(pulls=3)
    request = pb.FetchRequest(lease=many.token, layout=producer.layout.to_proto(), num_blocks=24 * 40)
    with grpc.insecure_channel(producer.address) as channel:
        # More than the connection buffers, and read no further: both streams stay open.
        calls = [pb_grpc.KvTransferServiceStub(channel).Fetch(request) for _ in range(2)]
        for call in calls:
            next(call)
        for _ in range(20):
            with pytest.raises(ProducerBusyError):
                consumer.client.fetch(order_for(producer, lease))
        assert consumer.client.release(producer.address, lease.token, pulls=2)
        for call in calls:
            call.cancel()

    def is_served() -> bool:
        with suppress(ProducerBusyError):
            return bool(consumer.client.fetch(order_for(producer, lease)) > 0)
        return False

    wait_until(is_served)  # a place that is given back is taken again, and the refused ones spent no pull


@pytest.mark.parametrize("kind", ["unknown", "other layout", "whole"])
def test_every_end_of_a_fetch_gives_its_place_back(
    make_producer: Make, make_consumer: Make, order_for: Make, kind: str
) -> None:
    producer = make_producer(limits=ServerLimits(max_streams=1, lease_wait_seconds=0.01))
    consumer = make_consumer(**({"dtype": "float32"} if kind == "other layout" else {}))
    lease = producer.hold(pulls=4)
    if kind == "unknown":
        producer.leases.release(lease.token)
    causes: list[TransferCause] = []

    def is_answered() -> bool:
        try:
            consumer.client.fetch(order_for(producer, lease))
        except ProducerBusyError:
            return False  # the client hears the end just before the server counts it
        except KvTransferError as error:
            causes.append(error.cause)
        return True

    for _ in range(4):
        wait_until(is_answered)
    expected = {"unknown": TransferCause.UNKNOWN_LEASE, "other layout": TransferCause.LAYOUT_MISMATCH}
    assert causes == ([expected[kind]] * 4 if kind in expected else [])


def test_second_server_on_a_port_is_refused_by_address(producer: Any, make_producer: Make) -> None:
    with pytest.raises(KvServerError, match=f"127.0.0.1:{producer.server.port}"):
        make_producer(port=producer.server.port)


def test_standard_health_service_answers(producer: Any) -> None:
    with grpc.insecure_channel(producer.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "specserve_protos.v1alpha1.KvTransferService"):
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_watchers_of_the_health_service_take_no_place_from_fetches(
    make_producer: Make, consumer: Any, order_for: Make
) -> None:
    producer = make_producer(limits=ServerLimits(max_streams=2))
    lease = producer.hold()
    with grpc.insecure_channel(producer.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(24):  # more than the server takes calls at once, and none is closed by its client
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
            with pytest.raises(grpc.RpcError):
                next(watch)
            assert watch.code() is grpc.StatusCode.UNIMPLEMENTED
        assert consumer.client.fetch(order_for(producer, lease)) > 0
        response = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert response.status == health_pb2.HealthCheckResponse.SERVING


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=3000), st.sampled_from([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00"]))
def test_garbage_on_the_port_does_no_harm(producer: Any, data: bytes, prefix: bytes) -> None:
    with socket.create_connection(("127.0.0.1", producer.server.port), timeout=5) as raw:
        raw.sendall(prefix + data)
    assert not producer.leases.release(b"\0" * 16)


HOSTILE: list[Any] = []  # the producer of all examples
REQUESTS = st.builds(
    pb.FetchRequest,
    lease=st.sampled_from([b"good", b""]) | st.binary(max_size=20),
    layout=st.just(None)
    | st.builds(pb.KvLayout, dtype=st.text(max_size=5), block_size_tokens=st.integers(0, 2**32 - 1)),
    first_block=st.integers(0, 2**32 - 1) | st.integers(0, 5),
    num_blocks=st.integers(0, 2**32 - 1) | st.integers(0, 5),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS | st.binary(max_size=200), st.booleans())
def test_hostile_requests_are_refused_and_the_server_goes_on(
    make_producer: Make, make_consumer: Make, order_for: Make, request: pb.FetchRequest | bytes, is_own_layout: bool
) -> None:
    if not HOSTILE:
        HOSTILE.append(make_producer(limits=ServerLimits(lease_wait_seconds=0.0)))
    producer = HOSTILE[0]
    lease = producer.hold((1, 2))
    if isinstance(request, pb.FetchRequest):
        if request.lease == b"good":
            request.lease = lease.token
        if is_own_layout:
            request.layout.CopyFrom(producer.layout.to_proto())
        request = request.SerializeToString()
    service = "/specserve_protos.v1alpha1.KvTransferService"
    with grpc.insecure_channel(producer.address) as channel:
        for method in ("Fetch", "Release"):
            call = channel.unary_stream(f"{service}/{method}")(request, timeout=20)
            with suppress(grpc.RpcError):
                list(call)
            assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    producer.leases.release(lease.token)
    wait_until(lambda: producer.leases.open_count == 0)
    healthy = producer.hold()
    consumer = make_consumer()
    assert consumer.client.fetch(order_for(producer, healthy)) > 0
    consumer.client.close()
