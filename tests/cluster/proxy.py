"""The network between a client and an API server, which can fall silent or break."""

import asyncio
from pathlib import Path
from typing import Self

from hack.kube.components import API_SERVER_PORT
from tests.cluster.api import BackgroundLoop

_CHUNK_BYTES = 65536


class Proxy:
    """Forwards TCP connections to the API server at `address`, on another port of the same address."""

    def __init__(self, address: str, background: BackgroundLoop) -> None:
        self._address = address
        self._background = background
        self._flow = _open_flow()
        self._stranded: list[asyncio.Event] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    def __enter__(self) -> Self:
        self._background.run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def redirect(self, kubeconfig: Path, server: str) -> Path:
        """A kubeconfig like the given one for `server`, by way of this proxy."""
        redirected = kubeconfig.with_name(f"{kubeconfig.stem}-by-proxy.conf")
        redirected.touch(mode=0o600)
        redirected.write_text(kubeconfig.read_text().replace(server, f"https://{self._address}:{self._port}"))
        return redirected

    def freeze(self) -> None:
        """Connections stay, new ones are accepted, and no byte goes through."""
        self._background.loop.call_soon_threadsafe(self._flow.clear)

    def strand(self) -> None:
        """Connections that there are fall silent and stay; new ones work."""
        self._stranded.append(self._flow)
        self._background.loop.call_soon_threadsafe(self._flow.clear)
        self._flow = _open_flow()

    def thaw(self) -> None:
        """What was held back goes through, and all else."""
        for flow in (self._flow, *self._stranded):
            self._background.loop.call_soon_threadsafe(flow.set)

    def cut(self) -> None:
        """All connections break, new ones are refused; what was held back is lost."""
        self._background.run(self._close())

    def mend(self) -> None:
        """Takes connections again, after `cut`."""
        self._flow = _open_flow()
        self._background.run(self._listen())

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._address, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            # A connection that was accepted in this turn of the loop would be lost by a close, and never be closed.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            await asyncio.sleep(0)
            self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        flow, upstream_writer = self._flow, None
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self._address, API_SERVER_PORT)
            await asyncio.gather(_pump(reader, upstream_writer, flow), _pump(upstream_reader, writer, flow))
        except (OSError, asyncio.CancelledError):
            pass  # one side has gone, or the connection was cut: so does the other
        finally:
            self._connections.discard(task)
            for opened in (writer, upstream_writer):
                if opened is not None:
                    opened.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flow: asyncio.Event) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        await flow.wait()
        writer.write(chunk)
        await writer.drain()
    raise ConnectionResetError


def _open_flow() -> asyncio.Event:
    flow = asyncio.Event()
    flow.set()
    return flow
