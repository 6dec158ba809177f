"""The way of one HTTP request through a serving pod: an ASGI application around the engine's own server.

Readiness is answered here. A request is counted, bounded, checked for transfer parameters it must not bring,
and on a decode pod its prompt may be prefilled by a prefill pod before the engine sees it.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

from specserve_workers.control.drain import DrainState
from specserve_workers.control.stats import FallbackCause, RequestOutcome, ServingStats
from specserve_workers.frontend.body_shape import Separators, has_more_checks
from specserve_workers.frontend.disaggregation import (
    TRANSFER_FIELD,
    TransferParams,
    find_transfer_params,
    is_prefill_order,
    is_remote,
    prefill_body,
)
from specserve_workers.frontend.errors import Header, error_body, json_headers
from specserve_workers.frontend.lease_release import LeaseReleaser
from specserve_workers.frontend.prefill_client import PrefillClient, PrefillResult
from specserve_workers.frontend.responses import HeldResponse, Message, Send

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER: Final[Header] = (b"retry-after", b"1")
# Headers of a client that a prefill pod needs to judge the request alike.
_FORWARDED_HEADERS: Final = ("authorization",)
# The engine's server takes forms with files here, and nothing else: what it would obey in JSON it does not read.
_UPLOAD_PATHS: Final = "/v1/audio/"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Pool(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    pool: Pool
    block_size_tokens: int
    max_body_bytes: int = 64 << 20
    # A prompt of a million token ids, or of several millions in text.
    max_body_separators: int = 1 << 20
    # Lists and objects, and what else the engine may have to complain of one by one.
    max_body_containers: int = 1 << 15


@dataclass(slots=True)
class Disaggregation:
    """What a decode pod with prefill peers has; absent, the pod serves aggregated."""

    client: PrefillClient
    releaser: LeaseReleaser


class _ClientGoneError(Exception):
    """The client closed its connection before it was answered."""


class _RefusedError(Exception):
    """A request that must not reach the engine. The message is for the client; `param` names what is wrong with it."""

    def __init__(self, message: str, *, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class Frontend:
    """ASGI application in front of `app`."""

    def __init__(
        self,
        app: App,
        settings: FrontendSettings,
        *,
        stats: ServingStats,
        drain: DrainState,
        is_ready: Callable[[], bool],
        disaggregation: Disaggregation | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._stats = stats
        self._drain = drain
        self._is_ready = is_ready
        self._disaggregation = disaggregation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        if path == "/ready":
            await self._answer_ready(send)
        elif method == "POST":
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_ready(self, send: Send) -> None:
        if self._drain.draining:
            await _answer(send, HTTPStatus.SERVICE_UNAVAILABLE, {"status": "draining"}, headers=[RETRY_AFTER])
        elif not self._is_ready():
            await _answer(send, HTTPStatus.SERVICE_UNAVAILABLE, {"status": "starting"}, headers=[RETRY_AFTER])
        else:
            await _answer(send, HTTPStatus.OK, {"status": "ready"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts a request and sees to it that it ends in one of the four outcomes, whatever happens."""
        arrived = time.perf_counter()
        request_id = _request_id(scope)
        held = HeldResponse(
            send,
            extra_headers=[(b"x-request-id", request_id.encode())],
            on_first_token=lambda: self._observe_first_token(held, arrived),
            hide_transfer_params=self._settings.pool is Pool.DECODE,
        )
        if self._drain.draining:
            await held.fail(HTTPStatus.SERVICE_UNAVAILABLE, "This pod is draining.", headers=[RETRY_AFTER])
            return
        task = asyncio.current_task()
        assert task is not None, "ASGI applications run in tasks"
        self._stats.begin()
        self._drain.enter(task)
        outcome = RequestOutcome.FAILED
        try:
            exchange = _Exchange(scope, receive, request_id)
            await self._pass_on(exchange, held)
            outcome = _outcome(held)
        except _ClientGoneError:
            outcome = RequestOutcome.CANCELLED
        except asyncio.CancelledError:
            if not self._drain.expired:
                raise
            task.uncancel()
            await held.fail(HTTPStatus.SERVICE_UNAVAILABLE, "This pod has stopped.", headers=[RETRY_AFTER])
        except Exception:
            logger.exception("request %s failed", request_id)
            await held.fail(HTTPStatus.INTERNAL_SERVER_ERROR, "The engine failed to answer this request.")
            if not held.ended:
                raise
        finally:
            self._drain.leave(task)
            self._stats.end(outcome)

    async def _pass_on(self, exchange: "_Exchange", held: HeldResponse) -> None:
        try:
            await exchange.read_body(self._settings)
            body = exchange.parse_body()
            self._check_containers(exchange, body)
            self._check_transfer_params(body)
        except _RefusedError as error:
            await held.replace(error.status, error_body(error.status, str(error), param=error.param))
            return
        params: TransferParams | None = None
        cause: FallbackCause | None = None
        exchange.watch_client()
        try:
            params, cause = await self._prefill_remotely(exchange, body)
            await self._app(exchange.scope, exchange.receive, held.send)
            if not held.ended and not exchange.is_client_gone:
                await held.fail(HTTPStatus.INTERNAL_SERVER_ERROR, "The response ended early.")
        finally:
            exchange.close()
            if cause is not None and held.status == HTTPStatus.OK:
                self._stats.fallbacks[cause] += 1
            # A first token means that the engine is done with the transfer, however it went.
            if params is not None and (not held.sent or held.status != HTTPStatus.OK):
                self._release(params)
        if exchange.is_client_gone and not held.ended:
            raise _ClientGoneError

    def _check_containers(self, exchange: "_Exchange", body: Any) -> None:
        most = self._settings.max_body_containers
        if exchange.separators.count >= most and has_more_checks(body, most):
            raise _too_large(f"{most} lists, objects and single values (token ids and texts in objects aside)")

    def _check_transfer_params(self, body: Any) -> None:
        """Only a prefill pod may be given transfer parameters, and only the order of a decode pod."""
        found = find_transfer_params(body)
        if self._settings.pool is Pool.PREFILL:
            found = [params for params in found if not is_prefill_order(params)]
        if found:
            raise _RefusedError(f"`{TRANSFER_FIELD}` is reserved for this service's own pods.", param=TRANSFER_FIELD)

    async def _prefill_remotely(
        self, exchange: "_Exchange", body: Any
    ) -> tuple[TransferParams | None, FallbackCause | None]:
        """Has the prompt prefilled on a peer where that makes sense, and puts the answer into the request."""
        path = exchange.scope["path"]
        if self._disaggregation is None or not isinstance(body, dict):
            return None, None
        if not is_remote(path, body, block_size_tokens=self._settings.block_size_tokens):
            return None, None
        began = time.perf_counter()
        is_taken = False
        call = asyncio.create_task(
            self._disaggregation.client.prefill(path, prefill_body(path, body), headers=exchange.forwarded_headers)
        )
        try:
            await asyncio.wait({call, exchange.watch_client()}, return_when=asyncio.FIRST_COMPLETED)
            if exchange.is_client_gone:
                raise _ClientGoneError
            result = call.result()
            if result.params is not None:
                exchange.replace_body(body | {TRANSFER_FIELD: dict(result.params.fields)})
            is_taken = True
        except _ClientGoneError:
            raise
        except Exception:
            logger.exception("the prefill call failed")
            return None, FallbackCause.PREFILL_ERROR
        finally:
            if not is_taken:
                self._abandon(call)
        if result.params is not None:
            self._stats.remote_prefill.observe((time.perf_counter() - began) * 1000)
        return result.params, result.cause

    def _abandon(self, call: asyncio.Task[PrefillResult]) -> None:
        """Ends a prefill call that nobody waits for; if it ends with a prompt all the same, that is held in vain."""
        call.cancel()
        call.add_done_callback(self._release_result)

    def _release_result(self, call: asyncio.Task[PrefillResult]) -> None:
        if not call.cancelled() and call.exception() is None and (params := call.result().params) is not None:
            self._release(params)

    def _release(self, params: TransferParams) -> None:
        assert self._disaggregation is not None, "only a disaggregated pod has leases to release"
        self._stats.released_leases += 1
        self._disaggregation.releaser.release(params)

    def _observe_first_token(self, held: HeldResponse, arrived: float) -> None:
        if held.status == HTTPStatus.OK:
            self._stats.time_to_first_token.observe((time.perf_counter() - arrived) * 1000)


class _Exchange:
    """One request's body and the watch on its client."""

    def __init__(self, scope: Scope, receive: Receive, request_id: str) -> None:
        self._receive = receive
        self._body: bytes | None = None
        self._watch: asyncio.Task[Message] | None = None
        self._disconnected = False
        self.separators = Separators()
        # Of a header that is given twice, the engine's server reads the first.
        names = dict(reversed(scope["headers"]))
        self.forwarded_headers = {"x-request-id": request_id} | {
            name: names[name.encode()].decode("latin-1") for name in _FORWARDED_HEADERS if name.encode() in names
        }
        headers = [header for header in scope["headers"] if header[0] != b"x-request-id"]
        self.scope: Scope = {**scope, "headers": [*headers, (b"x-request-id", request_id.encode())]}

    @property
    def _is_upload(self) -> bool:
        return str(self.scope["path"]).startswith(_UPLOAD_PATHS)

    async def read_body(self, settings: FrontendSettings) -> None:
        """Reads the whole body. Raises _RefusedError once it is known to be larger than allowed."""
        max_bytes, max_separators = settings.max_body_bytes, settings.max_body_separators
        declared = dict(self.scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(f"{max_bytes} bytes")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise _too_large(f"{max_bytes} bytes")
            if not self._is_upload:
                self.separators.add(parts[-1])
            if self.separators.count > max_separators:
                raise _too_large(f"{max_separators} separators (commas, colons, opening brackets and braces)")
            if not message.get("more_body"):
                self._body = b"".join(parts)
                return

    def parse_body(self) -> Any:
        """The JSON value of the body, whatever its type is said to be; None where there is none.

        The engine's server reads a body with the same function, which also settles encodings and repeated names: what
        is no JSON here, it refuses. Only a body too deep to read may be readable elsewhere, from another depth.

        Raises:
            _RefusedError: the body cannot be judged.
        """
        if sum(name == b"content-type" for name, _ in self.scope["headers"]) > 1:
            raise _RefusedError("More than one `content-type` header.", param="content-type")
        if self._is_upload:
            return None
        try:
            return json.loads(self._body or b"")
        except ValueError:
            return None
        except RecursionError as error:
            raise _RefusedError("The request body is nested too deeply.") from error

    def replace_body(self, body: dict[str, Any]) -> None:
        self._body = json.dumps(body).encode()
        headers = [
            header for header in self.scope["headers"] if header[0] not in (b"content-length", b"transfer-encoding")
        ]
        self.scope["headers"] = [*headers, (b"content-length", str(len(self._body)).encode())]

    def watch_client(self) -> asyncio.Task[Message]:
        """A task that ends when the client is gone: after the body, nothing else can come."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._next_message())
        return self._watch

    @property
    def is_client_gone(self) -> bool:
        return self._disconnected

    async def receive(self) -> Message:
        """The application's `receive`: the body once, then what the client does."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.shield(self.watch_client())

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def _next_message(self) -> Message:
        message = await self._receive()
        self._disconnected = message["type"] == "http.disconnect"
        return message


def _too_large(most: str) -> _RefusedError:
    return _RefusedError(f"The request body has more than {most}.", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def _request_id(scope: Scope) -> str:
    for key, value in scope["headers"]:
        if key == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return str(value.decode("latin-1"))
    return uuid.uuid4().hex


def _outcome(held: HeldResponse) -> RequestOutcome:
    if held.status is None or held.status >= 500 or held.has_stream_error or not held.ended:
        return RequestOutcome.FAILED
    return RequestOutcome.SUCCEEDED if held.status < 400 else RequestOutcome.REFUSED


async def _answer(
    send: Send, status: HTTPStatus, document: dict[str, object], *, headers: list[Header] | None = None
) -> None:
    body = json.dumps(document).encode()
    await send({"type": "http.response.start", "status": status.value, "headers": json_headers(body, headers or [])})
    await send({"type": "http.response.body", "body": body, "more_body": False})
