"""The front end of a decode pod with prefill peers: real HTTP and gRPC on loopback, a stand-in engine."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from specserve_workers.control.drain import DrainState
from specserve_workers.control.stats import ServingStats
from specserve_workers.frontend.disaggregation import TransferParams
from specserve_workers.frontend.lease_release import LeaseReleaser
from specserve_workers.frontend.middleware import Disaggregation, Frontend, FrontendSettings, Pool
from specserve_workers.frontend.peers import PrefillTimeModel
from specserve_workers.frontend.prefill_client import PrefillClient, PrefillResult
from tests.component.asgi_harness import LEASE, EngineApp, PrefillPod, answer_json, ask, begin

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "def main():\n    return 0\n" * 4, "max_tokens": 16, "stream": True}


class DecodePod:
    def __init__(self, *peers: str) -> None:
        self.peers = peers
        self.engine = EngineApp()
        self.stats = ServingStats()
        self.times = PrefillTimeModel()
        self.client = PrefillClient(self.addresses, target_revision="t1", connect_timeout_seconds=2.0, times=self.times)
        self.releaser = LeaseReleaser()
        self.app = Frontend(
            self.engine,
            FrontendSettings(pool=Pool.DECODE, block_size_tokens=32),
            stats=self.stats,
            drain=DrainState(),
            is_ready=lambda: True,
            disaggregation=Disaggregation(self.client, self.releaser),
        )

    async def addresses(self) -> tuple[str, ...]:
        return self.peers

    def fallbacks(self) -> dict[str, int]:
        return {cause.value: count for cause, count in self.stats.fallbacks.items()}


@pytest.fixture
async def prefill() -> AsyncIterator[PrefillPod]:
    async with PrefillPod().serving() as pod:
        yield pod


@pytest.fixture
async def decode(prefill: PrefillPod) -> AsyncIterator[DecodePod]:
    pod = DecodePod(prefill.address)
    await pod.client.start()
    yield pod
    await pod.client.aclose()
    await pod.releaser.aclose()


def dead_address() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


async def test_a_prompt_is_prefilled_remotely_and_its_parameters_reach_the_engine(
    decode: DecodePod, prefill: PrefillPod
):
    headers = {"x-request-id": "r-1", "authorization": "Bearer k", "cookie": "private"}
    assert (await ask(decode.app, PATH, BODY, headers=headers)).status == 200
    assert prefill.bodies[0]["max_tokens"] == 1
    assert prefill.bodies[0]["prompt"] == BODY["prompt"]
    assert prefill.headers[0]["x-request-id"] == "r-1"
    assert prefill.headers[0]["authorization"] == "Bearer k"
    assert "cookie" not in prefill.headers[0]
    assert decode.engine.bodies == [BODY | {"kv_transfer_params": prefill.params()}]
    assert int(decode.engine.headers[0]["content-length"]) > len(str(BODY))
    assert decode.fallbacks() == {}
    assert decode.stats.remote_prefill.total == 1
    assert prefill.released == []


async def test_a_request_not_fit_for_it_is_served_without_a_call(decode: DecodePod, prefill: PrefillPod):
    await ask(decode.app, PATH, BODY | {"echo": True})
    await ask(decode.app, "/v1/responses", {"input": "x" * 100})
    assert prefill.bodies == []
    assert decode.fallbacks() == {}


async def test_no_peers_means_local_prefill(decode: DecodePod):
    decode.peers = ()
    assert (await ask(decode.app, PATH, BODY)).status == 200
    assert decode.engine.bodies == [BODY]
    assert decode.fallbacks() == {"no_peers": 1}


async def test_a_dead_peer_costs_a_refused_connection_and_then_nothing(decode: DecodePod, prefill: PrefillPod):
    decode.peers = (dead_address(), prefill.address)
    for _ in range(3):
        assert (await ask(decode.app, PATH, BODY)).status == 200
    assert len(prefill.bodies) == 3
    assert decode.fallbacks() == {}


async def test_with_only_dead_peers_the_prompt_is_prefilled_here(decode: DecodePod):
    decode.peers = (dead_address(),)
    assert (await ask(decode.app, PATH, BODY)).status == 200
    assert (await ask(decode.app, PATH, BODY)).status == 200
    assert decode.engine.bodies == [BODY, BODY]
    assert decode.fallbacks() == {"prefill_connect": 1, "peers_excluded": 1}


async def test_a_hung_peer_is_given_up_at_its_deadline(decode: DecodePod, prefill: PrefillPod):
    decode.times.untaught_seconds = 0.3
    prefill.behave = lambda request: asyncio.sleep(30)
    assert (await ask(decode.app, PATH, BODY)).status == 200
    assert decode.fallbacks() == {"prefill_timeout": 1}
    await asyncio.wait_for(prefill.cancelled.wait(), 5)


@pytest.mark.parametrize("status", [500, 503, 429, 302])
async def test_an_unwell_peer_is_left_for_another_one(decode: DecodePod, prefill: PrefillPod, status: int):
    async def fail(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"location": "/elsewhere"})

    async with PrefillPod(behave=fail).serving() as unwell:
        decode.peers = (unwell.address, prefill.address)
        assert (await ask(decode.app, PATH, BODY)).status == 200
        assert (len(unwell.bodies), len(prefill.bodies)) == (1, 1)
        assert decode.fallbacks() == {}
        decode.peers = (unwell.address,)
        decode.client._rotation._excluded_until.clear()
        await ask(decode.app, PATH, BODY)
        assert decode.fallbacks() == {"prefill_error": 1}


async def test_a_request_is_tried_on_two_pods_at_most(decode: DecodePod):
    decode.peers = tuple(dead_address() for _ in range(5))
    await ask(decode.app, PATH, BODY)
    assert len(decode.client._rotation._excluded_until) == 2


async def test_a_request_that_both_pods_refuse_is_no_fallback(decode: DecodePod, prefill: PrefillPod):
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {}}, status=400)

    prefill.behave = refuse
    decode.engine.respond = lambda scope, send: answer_json(scope, send, status=400)
    assert (await ask(decode.app, PATH, BODY)).status == 400
    assert decode.fallbacks() == {}
    decode.engine.respond = None
    assert (await ask(decode.app, PATH, BODY)).status == 200
    assert decode.fallbacks() == {"prefill_refused": 1}
    assert len(prefill.bodies) == 2, "a refusal is no reason to leave the peer out"


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"", "bad_answer"),
        (b"<html>", "bad_answer"),
        (b"[" * 5000, "bad_answer"),
        (b"{}", "not_held"),
        (b'{"kv_transfer_params": null}', "not_held"),
        (b'{"kv_transfer_params": {"do_remote_prefill": true}}', "bad_answer"),
        (b"x" * (2 << 20), "bad_answer"),
    ],
)
async def test_garbage_from_a_peer_means_local_prefill(
    decode: DecodePod, prefill: PrefillPod, answer: bytes, cause: str
):
    async def babble(request: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    prefill.behave = babble
    assert (await ask(decode.app, PATH, BODY)).status == 200
    assert decode.engine.bodies == [BODY]
    assert decode.fallbacks() == {cause: 1}


async def test_a_peer_of_another_revision_is_not_used(decode: DecodePod, prefill: PrefillPod):
    async def other(request: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": prefill.params(revision="t2")})

    prefill.behave = other
    await ask(decode.app, PATH, BODY)
    assert decode.fallbacks() == {"revision_mismatch": 1}


async def test_a_peer_that_breaks_off_means_local_prefill(decode: DecodePod, prefill: PrefillPod):
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100"})
        await response.prepare(request)
        await response.write(b"{")
        request.transport.close()
        return response

    prefill.behave = break_off
    assert (await ask(decode.app, PATH, BODY)).status == 200
    assert decode.fallbacks() == {"prefill_error": 1}


async def test_a_client_that_leaves_during_the_prefill_call_ends_it(decode: DecodePod, prefill: PrefillPod):
    prefill.behave = lambda request: asyncio.sleep(30)
    exchange = begin(decode.app, PATH, BODY)
    await asyncio.wait_for(prefill.arrived.wait(), 5)
    exchange.disconnect()
    await exchange.end()
    await asyncio.wait_for(prefill.cancelled.wait(), 5)
    assert decode.engine.bodies == []
    assert exchange.sent == []
    assert {outcome.value: count for outcome, count in decode.stats.outcomes.items()} == {"cancelled": 1}


async def test_a_request_refused_after_its_prefill_releases_the_lease(decode: DecodePod, prefill: PrefillPod):
    decode.engine.respond = lambda scope, send: answer_json(scope, send, status=400)
    assert (await ask(decode.app, PATH, BODY)).status == 400
    await asyncio.wait_for(prefill.release_seen.wait(), 5)
    assert prefill.released == [LEASE]


async def test_an_engine_failure_before_the_first_token_releases_the_lease(decode: DecodePod, prefill: PrefillPod):
    async def fail(scope: Any, send: Any) -> None:
        raise RuntimeError("engine dead")

    decode.engine.respond = fail
    assert (await ask(decode.app, PATH, BODY)).status == 500
    await asyncio.wait_for(prefill.release_seen.wait(), 5)
    assert prefill.released == [LEASE]


async def test_a_client_that_leaves_before_its_first_token_releases_the_lease(decode: DecodePod, prefill: PrefillPod):
    decode.engine.respond = lambda scope, send: asyncio.Event().wait()
    exchange = begin(decode.app, PATH, BODY)
    await decode.engine.until_asked()
    exchange.disconnect()
    await exchange.end()
    await asyncio.wait_for(prefill.release_seen.wait(), 5)
    assert prefill.released == [LEASE]


async def test_a_release_that_cannot_be_delivered_troubles_nobody(decode: DecodePod, prefill: PrefillPod):
    async def elsewhere(request: web.Request) -> web.Response:
        port = int(dead_address().split(":")[1])
        return web.json_response({"kv_transfer_params": prefill.params(port=port)})

    prefill.behave = elsewhere
    decode.engine.respond = lambda scope, send: answer_json(scope, send, status=400)
    assert (await ask(decode.app, PATH, BODY)).status == 400
    await decode.releaser.aclose()
    assert prefill.released == []


async def test_a_defect_in_the_prefill_call_still_serves_the_request(
    decode: DecodePod, monkeypatch: pytest.MonkeyPatch
):
    async def defect(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(decode.client, "prefill", defect)
    assert (await ask(decode.app, PATH, BODY)).status == 200
    assert decode.fallbacks() == {"prefill_error": 1}


async def test_concurrent_requests_spread_over_all_peers(decode: DecodePod, prefill: PrefillPod):
    async with PrefillPod().serving() as second:
        decode.peers = (prefill.address, second.address)
        answers = await asyncio.gather(*(ask(decode.app, PATH, BODY) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert (len(prefill.bodies), len(second.bodies)) == (10, 10)


@pytest.mark.parametrize("answer", ["not held", "429", "500", "bad answer", "other revision"])
async def test_a_peer_that_answers_is_asked_again_at_once(decode: DecodePod, prefill: PrefillPod, answer: str):
    responses = {
        "not held": lambda: web.json_response({"kv_transfer_params": None}),
        "429": lambda: web.Response(status=429),
        "500": lambda: web.Response(status=500),
        "bad answer": lambda: web.Response(text="{"),
        "other revision": lambda: web.json_response({"kv_transfer_params": prefill.params(revision="t2")}),
    }

    async def behave(request: web.Request) -> web.StreamResponse:
        return responses[answer]()

    prefill.behave = behave
    for _ in range(2):
        assert (await ask(decode.app, PATH, BODY)).status == 200
    assert len(prefill.bodies) == 2
    assert "peers_excluded" not in decode.fallbacks()


@pytest.mark.parametrize("failure", ["hangs", "breaks off"])
async def test_a_peer_that_does_not_answer_is_left_alone_for_a_while(
    decode: DecodePod, prefill: PrefillPod, failure: str
):
    async def behave(request: web.Request) -> web.StreamResponse | None:
        if failure == "hangs":
            await asyncio.sleep(30)
        assert request.transport is not None
        request.transport.abort()
        return None

    decode.times.untaught_seconds = 0.3
    prefill.behave = behave
    for _ in range(2):
        assert (await ask(decode.app, PATH, BODY)).status == 200
    assert len(prefill.bodies) == 1
    assert decode.fallbacks()["peers_excluded"] == 1


async def test_a_prefill_that_ends_while_its_request_is_cancelled_is_released(
    decode: DecodePod, prefill: PrefillPod, monkeypatch: pytest.MonkeyPatch
):
    result = PrefillResult(params=TransferParams(prefill.params()))
    may_end, begun = asyncio.Event(), asyncio.Event()

    async def call(*_: Any, **__: Any) -> PrefillResult:
        begun.set()
        await may_end.wait()
        exchange.task.cancel()  # between this end and the request's next step
        return result

    monkeypatch.setattr(decode.client, "prefill", call)
    exchange = begin(decode.app, PATH, BODY)
    assert exchange.task is not None
    await asyncio.wait_for(begun.wait(), 5)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await exchange.end()
    await asyncio.wait_for(prefill.release_seen.wait(), 5)
    assert prefill.released == [LEASE]


async def test_no_watch_on_the_client_outlives_a_cancelled_request(decode: DecodePod, prefill: PrefillPod):
    prefill.behave = lambda request: asyncio.sleep(30)
    before = asyncio.all_tasks()
    exchange = begin(decode.app, PATH, BODY)
    await asyncio.wait_for(prefill.arrived.wait(), 5)
    assert exchange.task is not None
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.end()
    await asyncio.wait_for(prefill.cancelled.wait(), 5)
    left = [task for task in asyncio.all_tasks() - before if "_next_message" in repr(task.get_coro())]
    assert left == []


async def test_a_request_without_valid_parts_is_the_engines_to_refuse(decode: DecodePod, prefill: PrefillPod):
    body = {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x" * 100}]}]}
    assert (await ask(decode.app, "/v1/chat/completions", body)).status == 200
    assert decode.engine.bodies == [body]
    assert prefill.bodies == []
