"""The engine's HTTP server of a fake pod: an ASGI application behind the real front end."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from specserve_workers.frontend.disaggregation import DISAGGREGATED_PATHS
from tests.fakes.engine.asgi import Receive, Send, read_body, respond, respond_json, serve_lifespan
from tests.fakes.engine.behaviour import LiveBehaviour
from tests.fakes.engine.engine import Answer, FakeEngine, Order
from tests.fakes.engine.openai_requests import (
    Answers,
    CompletionRequest,
    RequestError,
    StopWatch,
    model_list,
    parse_request,
)

logger = logging.getLogger("vllm.fake")

VERSION: Final = "0.32.0"


@dataclass(slots=True)
class _Choice:
    """One sequence of a request while it runs."""

    index: int
    order: Order
    answer: Answer
    text: StopWatch

    @property
    def finish_reason(self) -> str | None:
        return "stop" if self.text.is_stopped else self.answer.finish_reason


class OpenAiApp:
    """Set up by the server: `state.engine` is there before the first request."""

    def __init__(self, behaviour: LiveBehaviour, registry: CollectorRegistry) -> None:
        self.state = SimpleNamespace()
        self._behaviour = behaviour
        self._registry = registry
        # Errors that are due, in parts of one.
        self._error_credit = 0.0

    @property
    def _engine(self) -> FakeEngine:
        engine: FakeEngine = self.state.engine
        return engine

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await serve_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if method == "POST" and path in DISAGGREGATED_PATHS:
            await self._complete(scope, receive, send)
        elif method == "GET" and path == "/health":
            is_healthy = self._behaviour.now.healthy and not self._engine.errored
            await respond(send, HTTPStatus.OK if is_healthy else HTTPStatus.SERVICE_UNAVAILABLE, b"")
        elif method == "GET" and path == "/metrics":
            await respond(send, HTTPStatus.OK, generate_latest(self._registry), kind=CONTENT_TYPE_LATEST)
        elif method == "GET" and path == "/v1/models":
            args = self._engine.model_config
            await respond_json(send, model_list(args.served_model_name, max_model_tokens=args.max_model_len))
        elif method == "GET" and path == "/version":
            await respond_json(send, {"version": VERSION})
        else:
            await respond_json(send, {"detail": "Not Found"}, HTTPStatus.NOT_FOUND)

    async def _complete(self, scope: Any, receive: Receive, send: Send) -> None:
        raw = await read_body(receive)
        is_doomed = self._behaviour.is_doomed()
        now = self._behaviour.now
        self._error_credit += now.error_ratio
        if self._error_credit >= 1 - 1e-9:
            self._error_credit -= 1
            status = HTTPStatus(now.error_status)
            await respond_json(send, _error("This fake pod fails by order.", status), status)
            return
        args = self._engine.model_config
        try:
            limits = {"model": args.served_model_name, "max_model_tokens": args.max_model_len}
            request = parse_request(scope["path"], raw, **limits)
            self._check_size(request)
        except RequestError as error:
            await respond_json(send, error.body(), error.status)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id", b"none").decode()
        answers = Answers(request, request_id, int(time.time()))
        work = asyncio.create_task(self._work(answers, send, is_doomed=is_doomed))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    def _check_size(self, request: CompletionRequest) -> None:
        for order in _orders(request):
            if self._engine.blocks_needed(order) > self._engine.num_blocks:
                raise RequestError("The request needs more KV cache than there is.")

    async def _work(self, answers: Answers, send: Send, *, is_doomed: bool) -> None:
        """Runs all sequences of a request. What fails before anything is sent is a plain error."""
        choices = [
            _Choice(index, order, Answer(), StopWatch(answers.request.stop))
            for index, order in enumerate(_orders(answers.request))
        ]
        try:
            if answers.request.is_stream:
                await self._stream(answers, choices, send, is_doomed=is_doomed)
            else:
                await self._whole(answers, choices, send, is_doomed=is_doomed)
        except ExceptionGroup as group:
            error = group.exceptions[0]
            logger.error("request %s failed: %s", answers.request_id, error)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            document = _error(f"{type(error).__name__}: {error}", status)
            if answers.request.is_stream:
                # The front end makes a plain error of it where nothing has been sent.
                event = b"data: " + json.dumps(document).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": event + b"data: [DONE]\n\n", "more_body": False})
            else:
                await respond_json(send, document, status)

    async def _whole(self, answers: Answers, choices: list[_Choice], send: Send, *, is_doomed: bool) -> None:
        async def run(choice: _Choice) -> None:
            async for _ in self._texts(choice, is_doomed=is_doomed):
                pass

        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(run(choice))
        request = answers.request
        document = answers.whole(
            (request.echo_texts[choice.index // request.n] + choice.text.text for choice in choices),
            (choice.finish_reason for choice in choices),
            completion_tokens=sum(choice.answer.num_tokens for choice in choices),
            kv_transfer_params=choices[0].answer.kv_transfer_params,
        )
        await respond_json(send, document)

    async def _stream(self, answers: Answers, choices: list[_Choice], send: Send, *, is_doomed: bool) -> None:
        async def emit(event: bytes) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": True})

        async def run(choice: _Choice) -> None:
            is_first, echoed = True, answers.request.echo_texts[choice.index // answers.request.n]
            async for text in self._texts(choice, is_doomed=is_doomed):
                await emit(answers.part(choice.index, echoed + text, is_first=is_first))
                is_first, echoed = False, ""
            await emit(answers.part(choice.index, choice.text.rest(), finish_reason=choice.finish_reason))

        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(run(choice))
        if answers.request.includes_usage:
            await emit(answers.stream_usage(sum(choice.answer.num_tokens for choice in choices)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _texts(self, choice: _Choice, *, is_doomed: bool) -> AsyncIterator[str]:
        """A sequence's text as it comes, up to its stop string."""
        async with aclosing(self._engine.generate(choice.order, choice.answer, is_doomed=is_doomed)) as steps:
            async for words in steps:
                yield choice.text.add("".join(words))
                if choice.text.is_stopped:
                    return


def _orders(request: CompletionRequest) -> list[Order]:
    return [
        Order(
            prompt_token_ids=prompt,
            max_tokens=request.max_tokens,
            index=index,
            ends_by_itself=not request.ignore_eos,
            kv_transfer_params=request.kv_transfer_params,
        )
        for prompt in request.prompts
        for index in range(request.n)
    ]


def _error(message: str, status: HTTPStatus) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": status.value}}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
