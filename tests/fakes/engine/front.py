"""The HTTP server of a fake pod, and what is before the real front end: /fake and the faults of HTTP."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

import uvicorn

from tests.fakes.engine.asgi import Receive, Send, read_body, respond_json
from tests.fakes.engine.behaviour import BehaviourError, LiveBehaviour

PATH: Final = "/fake"
_HANG_POLL_SECONDS: Final = 0.05


class QuietServer(uvicorn.Server):
    """Leaves signals to those who have handlers for them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class SteeredApp:
    """An ASGI application around the pod's whole HTTP server. What it answers itself is in nobody's statistics."""

    def __init__(self, app: Any, behaviour: LiveBehaviour) -> None:
        self._app = app
        self._behaviour = behaviour

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == PATH:
            await self._steer(scope["method"], receive, send)
        else:
            while self._behaviour.now.hang_http:  # noqa: ASYNC110 - no one to set an event
                await asyncio.sleep(_HANG_POLL_SECONDS)
            if scope["path"] == "/ready" and not self._behaviour.now.ready:
                await respond_json(send, {"status": "not ready by order"}, HTTPStatus.SERVICE_UNAVAILABLE)
            else:
                await self._app(scope, receive, send)

    async def _steer(self, method: str, receive: Receive, send: Send) -> None:
        try:
            if method == "POST":
                self._behaviour.update(_fields(await read_body(receive)))
            elif method == "DELETE":
                self._behaviour.reset()
        except BehaviourError as error:
            await respond_json(send, {"error": str(error)}, HTTPStatus.BAD_REQUEST)
        else:
            await respond_json(send, dataclasses.asdict(self._behaviour.now), HTTPStatus.OK)


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise BehaviourError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BehaviourError("not a JSON object")
    return fields
