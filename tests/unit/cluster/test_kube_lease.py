"""Who holds the Lease: candidates against one API server, each with a clock of its own."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from specserve_operator.cluster.kube.client import KubeClient
from specserve_operator.cluster.kube.lease import LEASE_SECONDS, RENEW_SECONDS, Lease, LeaseLostError, run_as_leader
from specserve_operator.probes import serving

PATH = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"


class Leases:
    """An API server with one Lease, which it changes only for who names the newest version."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.is_down = False
        self.on_request: Callable[[int], None] = lambda number: None
        self._requests = 0

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"].get("holderIdentity", ""))

    async def handle(self, request: web.Request) -> web.Response:
        self._requests += 1
        self.on_request(self._requests)
        if self.is_down:
            return web.json_response({"message": "down"}, status=503)
        body = await request.json() if request.can_read_body else None
        if request.method == "GET":
            missing = self.lease is None
            return web.json_response({"message": "none"} if missing else self.lease, status=404 if missing else 200)
        assert body is not None
        if body["spec"].get("holderIdentity", "x") == "":
            return web.json_response({"message": "spec.holderIdentity: must not be empty"}, status=422)
        version = 0 if self.lease is None else int(self.lease["metadata"]["resourceVersion"])
        if body["metadata"].get("resourceVersion", "0") != str(version):
            return web.json_response({"message": "conflict"}, status=409)
        self.lease = copy.deepcopy(body)
        assert self.lease is not None
        self.lease["metadata"]["resourceVersion"] = str(version + 1)
        return web.json_response(self.lease)


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.fixture
async def client(leases: Leases) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_route("*", PATH, leases.handle)
    app.router.add_route("*", f"{PATH}/operator", leases.handle)
    async with serving(app, "127.0.0.1", 0) as port, KubeClient(Configuration(host=f"http://127.0.0.1:{port}")) as kube:
        yield kube


def candidate(client: KubeClient, identity: str, time: Time) -> Lease:
    return Lease(client, namespace="ns", name="operator", identity=identity, time=time)


async def test_the_first_one_takes_the_lease_and_the_second_waits(leases: Leases, client: KubeClient) -> None:
    time = Time()

    assert await candidate(client, "a", time).try_to_hold()
    assert not await candidate(client, "b", time).try_to_hold()

    assert leases.holder == "a"


async def test_a_lease_that_is_renewed_is_never_taken(leases: Leases, client: KubeClient) -> None:
    time = Time()
    a, b = candidate(client, "a", time), candidate(client, "b", time)
    for _ in range(5):
        assert await a.try_to_hold()
        assert not await b.try_to_hold()
        time.now += LEASE_SECONDS - 1

    assert leases.holder == "a"


async def test_a_lease_that_is_silent_for_its_time_is_taken(leases: Leases, client: KubeClient) -> None:
    time = Time()
    a, b = candidate(client, "a", time), candidate(client, "b", time)
    await a.try_to_hold()
    assert not await b.try_to_hold()

    time.now += LEASE_SECONDS - 0.1
    assert not await b.try_to_hold()
    time.now += 0.1
    assert await b.try_to_hold()

    assert leases.holder == "b"
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseTransitions"] == 2
    assert not await a.try_to_hold()


async def test_an_old_lease_is_not_taken_before_it_was_watched_for_its_time(leases: Leases, client: KubeClient) -> None:
    """Its times are those of another machine, whose clock may be wrong."""
    await candidate(client, "a", Time()).try_to_hold()
    assert leases.lease is not None
    leases.lease["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"

    assert not await candidate(client, "b", Time()).try_to_hold()


async def test_of_two_that_take_it_at_once_one_gets_it(leases: Leases, client: KubeClient) -> None:
    time = Time()
    got = await asyncio.gather(*(candidate(client, name, time).try_to_hold() for name in "abcdef"))

    assert sum(got) == 1


async def test_a_lease_that_is_given_back_is_taken_at_once(leases: Leases, client: KubeClient) -> None:
    time = Time()
    a, b = candidate(client, "a", time), candidate(client, "b", time)
    await a.try_to_hold()
    assert not await b.try_to_hold()

    await a.release()

    assert await b.try_to_hold()


async def test_work_that_ends_gives_the_lease_back(leases: Leases, client: KubeClient) -> None:
    time = Time()
    seen = []

    async def work() -> None:
        seen.append(leases.holder)

    await run_as_leader(candidate(client, "a", time), work, time=time)

    assert (seen, leases.holder) == (["a"], "")


async def test_work_is_cancelled_when_somebody_else_has_the_lease(
    leases: Leases, client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve_operator.cluster.kube.lease.RETRY_SECONDS", 0.01)
    time, was_cancelled = Time(), asyncio.Event()

    async def work() -> None:
        assert leases.lease is not None
        leases.lease["spec"]["holderIdentity"] = "b"
        leases.lease["metadata"]["resourceVersion"] = "9"
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    with pytest.raises(LeaseLostError, match="taken by somebody else"):
        await run_as_leader(candidate(client, "a", time), work, time=time)

    assert was_cancelled.is_set()


@pytest.mark.parametrize("slow", [(1, 2), (3, 4)], ids=["the first answers are slow", "those to a renewal are"])
async def test_time_counts_from_the_request_and_not_from_its_late_answer(
    leases: Leases, client: KubeClient, monkeypatch: pytest.MonkeyPatch, slow: tuple[int, int]
) -> None:
    """Others count from when the Lease was written, which may be any moment between the two."""
    monkeypatch.setattr("specserve_operator.cluster.kube.lease.RETRY_SECONDS", 0.01)
    time, asked_at = Time(), 0.0

    def on_request(number: int) -> None:
        nonlocal asked_at
        if number == slow[0]:
            asked_at = time.now
        time.now += 4 if number in slow else 0.5
        leases.is_down = number > slow[1]

    leases.on_request = on_request
    with pytest.raises(LeaseLostError, match="not renewed in time"):
        await run_as_leader(candidate(client, "a", time), asyncio.Event().wait, time=time)

    assert RENEW_SECONDS <= time.now - asked_at <= RENEW_SECONDS + 0.5


async def test_work_is_cancelled_when_the_lease_cannot_be_renewed_in_time(
    leases: Leases, client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve_operator.cluster.kube.lease.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("specserve_operator.cluster.kube.lease.RENEW_SECONDS", 0.3)

    async def work() -> None:
        leases.is_down = True
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    with pytest.raises(LeaseLostError, match="not renewed in time"):
        await run_as_leader(
            Lease(client, namespace="ns", name="operator", identity="a", time=loop.time), work, time=loop.time
        )
