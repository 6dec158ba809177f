"""A guard in this process, between clients of a test and a router that a test plays itself."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from specserve_workers.gateway.server import Gateway
from specserve_workers.gateway.settings import GuardSettings

HELLO = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
REFUSED = b"GET /list_workers HTTP/1.1\r\nhost: a\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
WAIT_SECONDS = 10


@dataclass
class Side:
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self, length: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(length), WAIT_SECONDS)

    async def expect(self, data: bytes) -> None:
        """The next bytes are these."""
        assert await self.read(len(data)) == data

    async def read_head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_SECONDS)

    async def rest(self) -> bytes:
        """All until the other end closes, also if it breaks the connection off."""
        data = b""
        with suppress(ConnectionError):
            while more := await asyncio.wait_for(self.reader.read(1 << 16), WAIT_SECONDS):
                data += more
        return data

    async def refusal(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and error of an answer after which the connection is closed."""
        head, _, body = (await self.rest()).partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        assert headers["connection"] == "close"
        assert int(headers["content-length"]) == len(body)
        return int(first.split()[1]), headers, json.loads(body)["error"]

    def close(self) -> None:
        self.writer.close()

    async def aclose(self) -> None:
        self.writer.transport.abort()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


class GuardRig:
    """The guard, its clients, and its router."""

    def __init__(self, stack: AsyncExitStack, gateway: Gateway, port: int) -> None:
        self._stack = stack
        self._port = port
        self.gateway = gateway
        self.routers: asyncio.Queue[Side] = asyncio.Queue()

    async def client(self, data: bytes = b"") -> Side:
        """A client that has sent this."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        side = Side(reader, writer)
        self._stack.push_async_callback(side.aclose)
        writer.write(data)
        return side

    async def router(self) -> Side:
        """The router's end of the next connection that is made to it."""
        return await asyncio.wait_for(self.routers.get(), WAIT_SECONDS)

    async def pair(self, request: bytes = HELLO) -> tuple[Side, Side]:
        """A client whose request has come to the router."""
        client = await self.client(request)
        router = await self.router()
        await router.expect(request)
        return client, router


@asynccontextmanager
async def guard_rig(**settings: Any) -> AsyncIterator[GuardRig]:
    """`settings`: fields of GuardSettings."""
    async with AsyncExitStack() as stack:
        accepted: asyncio.Queue[Side] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            side = Side(reader, writer)
            stack.push_async_callback(side.aclose)
            accepted.put_nowait(side)

        # No more than this is read ahead, so that a router that does not read is one.
        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 16)
        stack.callback(server.close)
        gateway = Gateway(GuardSettings(**settings), router_port=server.sockets[0].getsockname()[1])
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        await gateway.listen(sock)
        watch = asyncio.create_task(gateway.watch_deadlines())
        stack.callback(watch.cancel)
        stack.push_async_callback(gateway.finish)
        rig = GuardRig(stack, gateway, port)
        rig.routers = accepted
        yield rig
