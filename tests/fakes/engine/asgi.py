"""The few things of ASGI that a fake pod's HTTP applications share."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON: Final = "application/json"


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request, or what of it came before its client left."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def respond(send: Send, status: HTTPStatus, body: bytes, *, kind: str = JSON) -> None:
    """Answers with a body at once."""
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def respond_json(send: Send, document: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
    """Answers with a JSON value."""
    await respond(send, status, json.dumps(document).encode())


async def serve_lifespan(receive: Receive, send: Send) -> None:
    """Says that there is nothing to start or to stop."""
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
