"""Stand-ins around the front end: an ASGI client in memory, an engine application, a prefill pod on loopback."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web

from specserve_protos.v1alpha1 import kv_transfer_pb2, kv_transfer_pb2_grpc

LEASE = "0123456789abcdef" * 2


@dataclass
class Exchange:
    """One request to an ASGI application; messages of the answer as they come."""

    scope: dict[str, Any]
    incoming: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    sent: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.changed.set()

    def disconnect(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def until_sent(self, count: int) -> None:
        """Waits until so many messages of the answer have come."""
        while len(self.sent) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 5)

    async def end(self) -> "Exchange":
        assert self.task is not None
        await asyncio.wait_for(self.task, 10)
        return self

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def json(self) -> Any:
        assert int(self.headers["content-length"]) == len(self.body)
        return json.loads(self.body)


def begin(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    more_headers: Sequence[tuple[str, str]] = (),
) -> Exchange:
    """Sends a request; `body` is JSON unless it is bytes. `more_headers` may repeat names."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    all_headers = {"content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(key.encode(), value.encode()) for key, value in [*all_headers.items(), *more_headers]],
    }
    exchange = Exchange(scope)
    half = len(raw) // 2
    exchange.incoming.put_nowait({"type": "http.request", "body": raw[:half], "more_body": True})
    exchange.incoming.put_nowait({"type": "http.request", "body": raw[half:], "more_body": False})
    exchange.task = asyncio.create_task(app(scope, exchange.incoming.get, exchange.send))
    return exchange


async def ask(app: Any, path: str, body: Any = None, **options: Any) -> Exchange:
    return await begin(app, path, body, **options).end()


@dataclass
class EngineApp:
    """Stands for the engine's server: keeps what it was asked, answers by `respond`."""

    respond: Callable[[Any, Callable[..., Awaitable[None]]], Awaitable[None]] | None = None
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    disconnects: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_asked(self, count: int = 1) -> None:
        """Waits until so many requests have come."""
        while len(self.bodies) < count:
            self.asked.clear()
            await asyncio.wait_for(self.asked.wait(), 5)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert message["more_body"] is False
        self.headers.append({key.decode(): value.decode() for key, value in scope["headers"]})
        try:
            self.bodies.append(json.loads(message["body"] or b"null"))
        except ValueError:
            self.bodies.append(message["body"])
        self.asked.set()
        watch = asyncio.create_task(self._watch(receive))
        answer = asyncio.create_task((self.respond or answer_json)(scope, send))
        await asyncio.wait({watch, answer}, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if not answer.done():
            answer.cancel()
            return
        answer.result()

    async def _watch(self, receive: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        self.disconnects += 1


async def answer_json(scope: Any, send: Any, *, status: int = 200, document: Any = None) -> None:
    body = json.dumps(document if document is not None else {"ok": True}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def start_stream(send: Any) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_event(send: Any, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})


@dataclass
class PrefillPod:
    """A prefill pod's HTTP and KV ports. `behave` may replace its good answer."""

    behave: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    release_seen: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""
    kv_port: int = 0

    def params(self, **changes: Any) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "lease": LEASE,
            "host": "127.0.0.1",
            "port": self.kv_port,
            "tensor_parallel_size": 1,
            "revision": "t1",
            "prompt_tokens": 40,
            "prompt_sha256": "ab" * 32,
            "num_blocks": 2,
        } | changes

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        self.arrived.set()
        try:
            answer = await self.behave(request) if self.behave else None
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return answer or web.json_response({"kv_transfer_params": self.params()})

    async def Release(self, request: kv_transfer_pb2.ReleaseRequest, context: Any) -> kv_transfer_pb2.ReleaseResponse:
        self.released.append(request.lease.hex())
        self.release_seen.set()
        return kv_transfer_pb2.ReleaseResponse(released=True)

    async def Fetch(self, request: kv_transfer_pb2.FetchRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["PrefillPod"]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = "{}:{}".format(*runner.addresses[0][:2])
        kv = grpc.aio.server()
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(self, kv)
        self.kv_port = kv.add_insecure_port("127.0.0.1:0")
        await kv.start()
        try:
            yield self
        finally:
            await kv.stop(0)
            await runner.cleanup()
