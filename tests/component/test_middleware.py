"""The front end over a stand-in engine, without prefill peers: counting, checks, held headers, failures, draining."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from specserve_workers.control.drain import DrainState
from specserve_workers.control.stats import RequestOutcome, ServingStats
from specserve_workers.frontend.middleware import Frontend, FrontendSettings, Pool
from tests.component.asgi_harness import (
    EngineApp,
    answer_json,
    ask,
    begin,
    send_event,
    start_stream,
)

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "x"}


class Pod:
    def __init__(self, *, pool: Pool = Pool.DECODE, respond: Any = None, **limits: int) -> None:
        self.engine = EngineApp(respond)
        self.stats = ServingStats()
        self.drain = DrainState()
        self.is_ready = True
        self.app = Frontend(
            self.engine,
            FrontendSettings(pool=pool, block_size_tokens=32, **limits),
            stats=self.stats,
            drain=self.drain,
            is_ready=lambda: self.is_ready,
        )

    def outcomes(self) -> dict[str, int]:
        return {outcome.value: count for outcome, count in self.stats.outcomes.items()}


async def test_a_request_passes_unchanged_and_is_counted():
    pod = Pod()
    answer = await ask(pod.app, PATH, BODY)
    assert (answer.status, answer.json) == (200, {"ok": True})
    assert pod.engine.bodies == [BODY]
    assert pod.outcomes() == {"succeeded": 1}
    assert pod.stats.running == 0


async def test_a_request_id_is_passed_on_and_made_where_there_is_none():
    pod = Pod()
    answer = await ask(pod.app, PATH, BODY, headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == pod.engine.headers[0]["x-request-id"] == "abc-1"
    answer = await ask(pod.app, PATH, BODY, headers={"x-request-id": "a b\n"})
    assert answer.headers["x-request-id"] == pod.engine.headers[1]["x-request-id"]
    assert len(answer.headers["x-request-id"]) == 32


async def test_headers_are_held_until_the_first_content():
    go = asyncio.Event()

    async def respond(scope: Any, send: Any) -> None:
        await start_stream(send)
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await go.wait()
        await send_event(send, "one")
        await send_event(send, "[DONE]", more=False)

    pod = Pod(respond=respond)
    exchange = begin(pod.app, PATH, BODY)
    for _ in range(20):
        await asyncio.sleep(0)
    assert pod.engine.bodies
    assert exchange.sent == []
    assert pod.stats.time_to_first_token.total == 0
    go.set()
    await exchange.end()
    assert [message["type"].rsplit(".", 1)[1] for message in exchange.sent] == ["start", "body", "body"]
    assert exchange.body == b"data: one\n\ndata: [DONE]\n\n"
    assert pod.stats.time_to_first_token.total == 1


async def test_only_streams_have_a_time_to_first_token():
    pod = Pod()
    await ask(pod.app, PATH, BODY)
    assert pod.stats.time_to_first_token.total == 0


async def test_an_engine_that_fails_after_its_headers_answers_500_and_not_half_a_stream():
    async def respond(scope: Any, send: Any) -> None:
        await start_stream(send)
        raise RuntimeError("engine dead")

    pod = Pod(respond=respond)
    answer = await ask(pod.app, PATH, BODY)
    assert answer.status == 500
    assert answer.json["error"]["code"] == 500
    assert "engine dead" not in answer.body.decode()
    assert pod.outcomes() == {"failed": 1}


async def test_an_error_as_the_first_event_becomes_a_status_that_a_gateway_can_retry():
    async def respond(scope: Any, send: Any) -> None:
        await start_stream(send)
        await send_event(send, json.dumps({"error": {"message": "no", "type": "ServiceUnavailable", "code": 503}}))
        await send_event(send, "[DONE]", more=False)

    pod = Pod(respond=respond)
    answer = await ask(pod.app, PATH, BODY)
    assert answer.status == 503
    assert answer.json["error"]["message"] == "no"
    assert len(answer.sent) == 2
    assert pod.outcomes() == {"failed": 1}


async def test_an_engine_that_dies_mid_stream_ends_the_stream_with_an_error_event():
    async def respond(scope: Any, send: Any) -> None:
        await start_stream(send)
        await send_event(send, "one")
        raise RuntimeError("engine dead")

    pod = Pod(respond=respond)
    answer = await ask(pod.app, PATH, BODY)
    assert answer.status == 200
    events = answer.body.decode().split("\n\n")
    assert events[0] == "data: one"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 500
    assert events[2] == "data: [DONE]"
    assert answer.sent[-1]["more_body"] is False
    assert pod.outcomes() == {"failed": 1}


async def test_a_stream_that_just_stops_ends_with_an_error_event():
    async def respond(scope: Any, send: Any) -> None:
        await start_stream(send)
        await send_event(send, "one")

    pod = Pod(respond=respond)
    answer = await ask(pod.app, PATH, BODY)
    assert b'{"error"' in answer.body
    assert pod.outcomes() == {"failed": 1}


async def test_an_error_event_of_the_engine_mid_stream_counts_as_failed():
    async def respond(scope: Any, send: Any) -> None:
        await start_stream(send)
        await send_event(send, "one")
        await send_event(send, '{"error": {"code": 500}}')
        await send_event(send, "[DONE]", more=False)

    pod = Pod(respond=respond)
    await ask(pod.app, PATH, BODY)
    assert pod.outcomes() == {"failed": 1}


async def test_a_json_answer_cut_in_the_middle_is_left_open():
    async def respond(scope: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"a":', "more_body": True})
        raise RuntimeError("engine dead")

    pod = Pod(respond=respond)
    with pytest.raises(RuntimeError, match="engine dead"):
        await ask(pod.app, PATH, BODY)
    assert pod.outcomes() == {"failed": 1}


async def test_a_client_that_leaves_before_its_answer_is_cancelled_in_the_engine():
    async def respond(scope: Any, send: Any) -> None:
        await asyncio.Event().wait()

    pod = Pod(respond=respond)
    exchange = begin(pod.app, PATH, BODY)
    await pod.engine.until_asked()
    exchange.disconnect()
    await exchange.end()
    assert pod.engine.disconnects == 1
    assert pod.outcomes() == {"cancelled": 1}


async def test_a_client_that_leaves_while_sending_never_reaches_the_engine():
    pod = Pod()
    exchange = begin(pod.app, PATH, BODY)
    exchange.incoming = asyncio.Queue()
    exchange.task.cancel()
    scope = exchange.scope
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    queue.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    queue.put_nowait({"type": "http.disconnect"})
    await pod.app(scope, queue.get, exchange.send)
    assert pod.engine.bodies == []
    assert pod.outcomes()["cancelled"] == 1


@pytest.mark.parametrize(
    "body",
    [
        BODY | {"kv_transfer_params": {"do_remote_prefill": True}},
        BODY | {"vllm_xargs": {"kv_transfer_params": "x"}},
        BODY | {"kv_transfer_params": {"do_remote_decode": True, "pulls": 1}},
    ],
)
async def test_a_clients_own_transfer_parameters_are_refused(body: Any):
    pod = Pod()
    answer = await ask(pod.app, PATH, body)
    assert answer.status == 400
    assert answer.json["error"]["param"] == "kv_transfer_params"
    assert pod.engine.bodies == []
    assert pod.outcomes() == {"refused": 1}


@pytest.mark.parametrize("more", ["multipart/form-data; boundary=x", "application/json"])
async def test_two_content_types_are_refused(more: str):
    pod = Pod()
    body = {**BODY, "kv_transfer_params": {"do_remote_prefill": True}}
    answer = await ask(pod.app, PATH, body, more_headers=[("Content-Type".lower(), more)])
    assert (answer.status, answer.json["error"]["type"]) == (400, "BadRequestError")
    assert answer.json["error"]["param"] == "content-type"
    assert pod.engine.bodies == []
    assert pod.outcomes() == {"refused": 1}


@pytest.mark.parametrize("content_type", ["multipart/form-data; boundary=x", "audio/wav", "text/plain", ""])
async def test_no_content_type_hides_transfer_parameters(content_type: str):
    pod = Pod()
    body = {**BODY, "kv_transfer_params": {"do_remote_prefill": True}}
    answer = await ask(pod.app, PATH, body, headers={"content-type": content_type})
    assert answer.status == 400
    assert pod.engine.bodies == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_no_encoding_hides_transfer_parameters(encoding: str):
    pod = Pod()
    body = json.dumps({**BODY, "kv_transfer_params": {"do_remote_prefill": True}}).encode(encoding)
    assert (await ask(pod.app, PATH, body)).status == 400
    assert pod.engine.bodies == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "kv_transfer_params": null, "kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"prompt": "x", "kv_transfer\\u005fparams": {"do_remote_prefill": true}}',
    ],
)
async def test_no_repeated_or_escaped_name_hides_transfer_parameters(body: bytes):
    pod = Pod()
    assert (await ask(pod.app, PATH, body)).status == 400
    assert pod.engine.bodies == []


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/x+json", "multipart/form-data", "text/plain"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be", "utf-7"])
@pytest.mark.parametrize(
    "text",
    [
        '{"kv_transfer_params": {"a": 1}}',
        '{"kv_transfer_params": null, "kv_transfer_params": {"a": 1}}',
        '{"kv_transfer_params": {"a": 1}, "kv_transfer_params": null}',
        '{"kv_transfer\\u005fparams": {"a": 1}}',
        '{"x": NaN, "kv_transfer_params": {"a": 1}}',
        '{"kv_transfer_params": {"a": 1}} x',
    ],
)
async def test_the_engines_kind_of_server_is_never_left_with_a_clients_parameters(
    text: str, encoding: str, content_type: str
):
    seen: list[Any] = []

    class Body(BaseModel):
        kv_transfer_params: dict[str, Any] | None = None

    engine = FastAPI()

    @engine.post(PATH)
    async def complete(body: Body) -> dict[str, bool]:
        seen.append(body.kv_transfer_params)
        return {"ok": True}

    pod = Pod()
    pod.app = Frontend(
        engine,
        FrontendSettings(pool=Pool.DECODE, block_size_tokens=32),
        stats=pod.stats,
        drain=pod.drain,
        is_ready=lambda: True,
    )
    await ask(pod.app, PATH, text.encode(encoding), headers={"content-type": content_type})
    assert seen in ([], [None])


async def test_a_body_nested_too_deeply_to_be_checked_is_refused():
    pod = Pod()
    answer = await ask(pod.app, PATH, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    assert (answer.status, answer.json["error"]["type"]) == (400, "BadRequestError")
    assert pod.engine.bodies == []


async def test_an_upload_of_audio_passes_as_it_is():
    pod = Pod()
    headers = {"content-type": "multipart/form-data; boundary=x"}
    body = b"--x\r\nkv_transfer_params\r\n--x--"
    assert (await ask(pod.app, "/v1/audio/transcriptions", body, headers=headers)).status == 200
    assert pod.engine.bodies == [body]


async def test_a_prefill_pod_takes_the_order_of_a_decode_pod_and_shows_its_answer():
    document = {"kv_transfer_params": {"lease": "x"}}
    pod = Pod(pool=Pool.PREFILL, respond=lambda scope, send: answer_json(scope, send, document=document))
    order = BODY | {"kv_transfer_params": {"do_remote_decode": True, "pulls": 2}}
    assert (await ask(pod.app, PATH, order)).json == document
    refused = await ask(pod.app, PATH, BODY | {"kv_transfer_params": {"do_remote_prefill": True, "lease": "0" * 32}})
    assert refused.status == 400
    assert pod.engine.bodies == [order]


async def test_transfer_parameters_never_reach_a_client_of_a_decode_pod():
    document = {"choices": [{"text": '"kv_transfer_params": {'}], "kv_transfer_params": {"lease": "secret"}}
    pod = Pod(respond=lambda scope, send: answer_json(scope, send, document=document))
    answer = await ask(pod.app, PATH, BODY)
    assert answer.json == document | {"kv_transfer_params": None}


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused(declared: bool):
    pod = Pod(max_body_bytes=100)
    headers = {} if declared else {"content-length": "x"}
    answer = await ask(pod.app, PATH, {"prompt": "x" * 200}, headers=headers)
    assert answer.status == 413
    assert "100 bytes" in answer.json["error"]["message"]
    assert pod.engine.bodies == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[" + b"1," * 1000 + b"1]", "1000 separators"),
        (b'{"prompt": [' + b"[]," * 500 + b"[]]}", "1000 separators"),
        (b"{" + b",".join(b'"k%d":1' % i for i in range(600)) + b"}", "1000 separators"),
        (('{"a": [' + "1," * 1000 + "1]}").encode("utf-16-le"), "1000 separators"),
        (b'{"prompt": [' + b"[]," * 150 + b"[]]}", "100 lists, objects and single values"),
        (b'{"x": {"y": [' + b"{}," * 150 + b"{}]}}", "100 lists, objects and single values"),
        (b'{"prompt": [' + b"null," * 150 + b"null]}", "100 lists, objects and single values"),
        (b'{"prompt": [' + b"-1," * 150 + b"-1]}", "100 lists, objects and single values"),
        (b'{"prompt": [' + b",".join([b"[null,null,null]"] * 50) + b"]}", "100 lists, objects and single values"),
        (b'{"messages": [' + b"1," * 150 + b"1]}", "100 lists, objects and single values"),
        (
            b'{"logit_bias": {' + b",".join(b'"%d":"x"' % i for i in range(150)) + b"}}",
            "100 lists, objects and single values",
        ),
    ],
)
async def test_a_body_that_would_hold_up_every_stream_while_it_is_read_is_refused(body: bytes, told: str):
    pod = Pod(max_body_separators=1000, max_body_containers=100)
    answer = await ask(pod.app, PATH, body)
    assert answer.status == 413
    assert f"more than {told}" in answer.json["error"]["message"]
    assert pod.engine.bodies == []
    assert pod.outcomes() == {"refused": 1}


async def test_a_body_of_too_many_values_is_not_read_to_its_end():
    pod = Pod(max_body_separators=1000)
    exchange = begin(pod.app, PATH, b"," * 4000)  # comes in two parts
    assert (await exchange.end()).status == 413
    assert exchange.incoming.qsize() == 1


async def test_a_body_within_the_bounds_passes_whatever_its_strings_hold():
    pod = Pod(max_body_separators=1000, max_body_containers=100)
    body = {"prompt": "[]" * 400, "stop": [str(i) for i in range(20)], "x": [[]] * 50}
    assert (await ask(pod.app, PATH, body)).status == 200
    assert pod.engine.bodies == [body]


@pytest.mark.parametrize("prompt", [list(range(900)), [list(range(300))] * 3])
async def test_a_prompt_of_many_token_ids_passes(prompt: Any):
    pod = Pod(max_body_separators=1000, max_body_containers=100)
    assert (await ask(pod.app, PATH, {"prompt": prompt})).status == 200
    assert pod.engine.bodies == [{"prompt": prompt}]


async def test_what_is_no_json_is_not_measured_as_such():
    pod = Pod(max_body_separators=10)
    headers = {"content-type": "multipart/form-data; boundary=x"}
    body = b"," * 100
    assert (await ask(pod.app, "/v1/audio/transcriptions", body, headers=headers)).status == 200
    assert pod.engine.bodies == [body]


async def test_a_body_that_is_no_json_is_the_engines_to_refuse():
    pod = Pod(respond=lambda scope, send: answer_json(scope, send, status=400))
    assert (await ask(pod.app, PATH, b'{"model":')).status == 400
    assert pod.engine.bodies == [b'{"model":']
    assert pod.outcomes() == {"refused": 1}


async def test_readiness_follows_start_and_draining():
    pod = Pod()
    pod.is_ready = False
    assert (await ask(pod.app, "/ready", method="GET")).status == 503
    pod.is_ready = True
    assert (await ask(pod.app, "/ready", method="GET")).json == {"status": "ready"}
    pod.drain.start()
    answer = await ask(pod.app, "/ready", method="GET")
    assert (answer.status, answer.json) == (503, {"status": "draining"})


async def test_draining_refuses_new_requests_and_lets_running_ones_end():
    go = asyncio.Event()

    async def respond(scope: Any, send: Any) -> None:
        await go.wait()
        await answer_json(scope, send)

    pod = Pod(respond=respond)
    running = begin(pod.app, PATH, BODY)
    await pod.engine.until_asked()
    drain = asyncio.create_task(pod.drain.wait(5.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not drain.done()
    refused = await ask(pod.app, PATH, BODY)
    assert refused.status == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json["error"]["code"] == 503
    go.set()
    assert (await running.end()).status == 200
    assert await drain is True
    assert len(pod.engine.bodies) == 1


async def test_no_request_drains_a_pod():
    pod = Pod(respond=lambda scope, send: answer_json(scope, send, status=404))
    assert (await ask(pod.app, "/drain", BODY)).status == 404
    assert not pod.drain.draining
    assert len(pod.engine.bodies) == 1


async def test_what_runs_at_the_end_of_the_drain_time_is_cut_with_a_readable_error():
    async def stream(scope: Any, send: Any) -> None:
        await start_stream(send)
        await send_event(send, "one")
        await asyncio.Event().wait()

    pod = Pod(respond=stream)
    streaming = begin(pod.app, PATH, BODY)
    await streaming.until_sent(2)
    pod.engine.respond = lambda scope, send: asyncio.Event().wait()
    waiting = begin(pod.app, PATH, BODY)
    await pod.engine.until_asked(2)
    assert await pod.drain.wait(0.0) is False
    assert await pod.drain.cut() == 2
    assert b'{"error"' in (await streaming.end()).body
    assert (await waiting.end()).status == 503
    assert pod.outcomes() == {RequestOutcome.FAILED.value: 2}


async def test_other_methods_pass_to_the_engine():
    async def respond(scope: Any, receive: Any, send: Any) -> None:
        await answer_json(scope, send, document={"data": []})

    pod = Pod()
    pod.app._app = respond
    assert (await ask(pod.app, "/v1/models", method="GET")).json == {"data": []}
    assert pod.stats.started == 0
