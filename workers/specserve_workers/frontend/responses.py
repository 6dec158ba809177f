"""The response on its way out: headers held until there is content, failures made readable, internals removed."""

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final

from specserve_workers.frontend.disaggregation import TRANSFER_FIELD
from specserve_workers.frontend.errors import Header, error_body, json_headers, stream_error

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_STREAM_ERROR: Final = b'data: {"error"'
_TRANSFER_PARAMS: Final = re.compile(rb'"kv_transfer_params":\s*\{')


class HeldResponse:
    """Passes an application's response on, with its headers held back until the first content.

    As long as nothing is sent, a gateway can try the request elsewhere: so a stream whose first event already is an
    error, or an application that fails after its headers, becomes a plain 5xx here.
    """

    def __init__(
        self,
        send: Send,
        *,
        extra_headers: list[Header],
        on_first_token: Callable[[], None],
        hide_transfer_params: bool,
    ) -> None:
        self._send = send
        self._extra_headers = extra_headers
        self._on_first_token = on_first_token
        self._hide = hide_transfer_params
        self._start: Message | None = None
        self.status: int | None = None
        self.sent = False  # anything has reached the client
        self.ended = False
        self.has_stream_error = False

    @property
    def is_event_stream(self) -> bool:
        headers = () if self._start is None else self._start.get("headers", ())
        return any(key.lower() == b"content-type" and value.startswith(b"text/event-stream") for key, value in headers)

    async def send(self, message: Message) -> None:
        """The application's `send`."""
        if message["type"] == "http.response.start":
            self._start, self.status = message, message["status"]
        elif message["type"] == "http.response.body" and self._start is not None:
            await self._body(message, self._start)
        else:
            await self._send(message)

    async def fail(self, status: HTTPStatus, message: str, *, headers: list[Header] | None = None) -> None:
        """Ends the response with an error: as a status of its own if nothing is sent, else as the stream's last event.

        A response cut within a body of known length is left open: the server then closes the connection, which is the
        one sign of it that the protocol has.
        """
        if self.ended:
            return
        if not self.sent:
            body = error_body(status, message)
            await self.replace(status, body, headers=headers)
        elif self.is_event_stream:
            self.ended = self.has_stream_error = True
            await self._send({"type": "http.response.body", "body": stream_error(message), "more_body": False})

    async def replace(self, status: HTTPStatus, body: bytes, *, headers: list[Header] | None = None) -> None:
        """Answers with a JSON body in place of the application's response, of which nothing may have been sent."""
        self.status, self.sent, self.ended = status.value, True, True
        all_headers = json_headers(body, [*(headers or []), *self._extra_headers])
        await self._send({"type": "http.response.start", "status": status.value, "headers": all_headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _body(self, message: Message, start: Message) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        if self.ended or (not self.sent and more and not body):
            return
        if body.startswith(_STREAM_ERROR) and self.is_event_stream:
            self.has_stream_error = True
            if not self.sent:
                await self._first_event_is_error(body)
                return
        if not self.sent:
            if self._hide and not more:
                body = self._without_transfer_params(body)
                message = {**message, "body": body}
            self.sent = True
            if self.is_event_stream:
                self._on_first_token()
            await self._send({**start, "headers": [*self._headers(start, body, more), *self._extra_headers]})
        self.ended = not more
        await self._send(message)

    async def _first_event_is_error(self, event: bytes) -> None:
        body = event.removeprefix(b"data: ").split(b"\n\n", 1)[0]
        try:
            code = json.loads(body)["error"]["code"]
            status = HTTPStatus(code if isinstance(code, int) and code >= 400 else 500)
        except (ValueError, KeyError, TypeError):
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        await self.replace(status, body)

    def _headers(self, start: Message, body: bytes, more: bool) -> list[Header]:
        replaced = {key for key, _ in self._extra_headers}
        headers = [(key, value) for key, value in start.get("headers", ()) if key.lower() not in replaced]
        if self._hide and not more:
            # The body is whole and may have become shorter.
            headers = [
                (key, str(len(body)).encode() if key.lower() == b"content-length" else value) for key, value in headers
            ]
        return headers

    def _without_transfer_params(self, body: bytes) -> bytes:
        if _TRANSFER_PARAMS.search(body) is None:
            return body
        try:
            document = json.loads(body)
        except ValueError:
            return body
        if not isinstance(document, dict) or TRANSFER_FIELD not in document:
            return body
        return json.dumps(document | {TRANSFER_FIELD: None}, ensure_ascii=False).encode()
