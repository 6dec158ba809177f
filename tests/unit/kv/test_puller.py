"""Pulls side by side: each ends once, and none waits for another producer's."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specserve_workers.kv.client import Cancellation, FetchOrder
from specserve_workers.kv.errors import TransferCause
from specserve_workers.kv.puller import Puller
from specserve_workers.kv.server import ServerLimits
from tests.fakes.waiting import wait_until

Make = Callable[..., Any]


class BlockingClient:
    """A client whose fetches hang until they are let go or cancelled, save those from "healthy:1"."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.fetched: list[str] = []
        self.released: list[tuple[str, bytes]] = []

    def fetch(self, order: FetchOrder, *, cancellation: Cancellation) -> int:
        self.fetched.append(order.address)
        cancellation.attach(self.let_go.set)
        if order.address != "healthy:1":
            assert self.let_go.wait(30)
        return 1

    def release(self, address: str, lease: bytes, *, pulls: int) -> bool:
        assert pulls == 1
        self.released.append((address, lease))
        return True

    def close(self) -> None:
        pass


def ended_pulls(puller: Puller, count: int) -> list[Any]:
    """The pulls that end next, when they are exactly `count`."""
    ended: list[Any] = []

    def are_over() -> bool:
        ended.extend(puller.pop_ended())
        return len(ended) == count

    wait_until(are_over)
    return ended


def test_puller_ends_every_pull_once(producer: Any, consumer: Any, order_for: Make) -> None:
    woken = threading.Event()
    puller = Puller(consumer.client, num_threads=2, on_end=woken.set)
    good = producer.hold(pulls=6)
    bad = producer.hold(request_id="bad")
    producer.leases.release(bad.token)
    for index in range(6):
        puller.submit(
            f"good{index}", order_for(producer, good, (4 * index, 4 * index + 1, 4 * index + 2, 4 * index + 3))
        )
    puller.submit("bad", order_for(producer, bad))
    ended = ended_pulls(puller, 7)
    assert woken.is_set()
    assert {pull.request_id: pull.cause for pull in ended} == {
        **{f"good{index}": None for index in range(6)},
        "bad": TransferCause.UNKNOWN_LEASE,
    }
    assert {pull.num_bytes for pull in ended if pull.cause is None} == {4 * producer.layout.block_bytes}
    puller.close()


def test_aborted_pull_ends_as_cancelled(make_producer: Make, consumer: Any, order_for: Make) -> None:
    producer = make_producer(limits=ServerLimits(lease_wait_seconds=60))
    lease = producer.hold()
    producer.leases.release(lease.token)
    puller = Puller(consumer.client, num_threads=1)
    puller.submit("running", order_for(producer, lease))
    puller.submit("queued", order_for(producer, lease))
    puller.cancel(["running", "queued", "unknown"])
    ended = ended_pulls(puller, 2)
    assert {pull.cause for pull in ended} == {TransferCause.CANCELLED}
    producer.leases.close()
    puller.close()


def test_cancelled_queued_pull_ends_at_once_and_gives_its_lease_up(producer: Any, order_for: Make) -> None:
    client = BlockingClient()
    puller = Puller(client, num_threads=1)
    lease = producer.hold()
    puller.submit("running", order_for(producer, lease))
    puller.submit("queued", order_for(producer, lease, (4, 5, 6, 7)))
    puller.cancel(["queued"])
    assert [(pull.request_id, pull.block_ids, pull.cause) for pull in puller.pop_ended()] == [
        ("queued", (4, 5, 6, 7), TransferCause.CANCELLED)
    ]
    wait_until(lambda: client.released == [(producer.address, lease.token)])
    client.let_go.set()
    puller.close()
    assert [pull.request_id for pull in puller.pop_ended()] == ["running"]
    assert client.fetched == [producer.address]


def test_hung_producer_does_not_delay_pulls_from_others(producer: Any, order_for: Make) -> None:
    client = BlockingClient()
    puller = Puller(client, num_threads=4)
    hung = order_for(producer, producer.hold())
    healthy = replace(hung, address="healthy:1")
    for index in range(8):
        puller.submit(f"hung{index}", hung)
    for index in range(3):
        puller.submit(f"healthy{index}", healthy)
    ended = ended_pulls(puller, 3)
    assert sorted(pull.request_id for pull in ended) == ["healthy0", "healthy1", "healthy2"]
    assert client.fetched.count(producer.address) == 2
    client.let_go.set()
    ended_pulls(puller, 8)
    assert client.fetched.count(producer.address) == 8
    puller.close()


def test_closing_the_puller_ends_what_runs(make_producer: Make, consumer: Any, order_for: Make) -> None:
    producer = make_producer(limits=ServerLimits(lease_wait_seconds=60))
    lease = producer.hold()
    producer.leases.release(lease.token)
    puller = Puller(consumer.client, num_threads=1)
    puller.submit("r", order_for(producer, lease))
    puller.close()
    assert [pull.request_id for pull in puller.pop_ended()] == ["r"]
    producer.leases.close()
