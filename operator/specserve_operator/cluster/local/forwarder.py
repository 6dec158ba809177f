"""What a ClusterIP does: connections to one port go to one of several backends, in turn.

Bytes are moved by two transports that know each other; a side that is full stops the other from being read, and the end
of one direction leaves the other open.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from typing import cast

from specserve_operator.cluster.local import ports

Backend = tuple[str, int]
_CONNECT_SECONDS = 5.0
_ACCEPT_RETRY_SECONDS = 0.5
_BACKLOG = 1024

logger = logging.getLogger(__name__)


def reset(transport: asyncio.Transport) -> None:
    """Ends a connection so that the peer sees an error, not an orderly end."""
    if (sock := transport.get_extra_info("socket")) is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Side(asyncio.Protocol):
    """One end of a forwarded connection; `other` is known once both ends are there."""

    def __init__(self) -> None:
        self.other: _Side | None = None
        self.is_lost = False
        self._ended = False  # nothing more comes from this end
        self._transport: asyncio.Transport | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        self._ended = True
        if self.other is not None and not self.other.is_lost:
            self.other.transport.write_eof()
            if self.other._ended:
                self.transport.close()
                self.other.transport.close()
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.is_lost:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_lost:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self.other is not None and not self.other.is_lost:
            if exc is None:
                self.other.transport.close()
            else:
                reset(self.other.transport)  # a reset goes on as a reset


class _Client(_Side):
    """The accepted end. Nothing is read from it until it has a backend."""

    def __init__(self, on_lost: Callable[["_Client"], None]) -> None:
        super().__init__()
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Not at once: before Python 3.12 the loop starts reading right after this call, whatever was said in it.
        asyncio.get_running_loop().call_soon(self.transport.pause_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(self)


class _Server(_Side):
    """The end towards a backend."""

    def __init__(self, client: _Client) -> None:
        super().__init__()
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._client.is_lost:
            self.transport.abort()
            return
        self.other, self._client.other = self._client, self
        self._client.transport.resume_reading()


class Forwarder:
    """Listens on one port while it has backends; without any, connections are refused and the port stays reserved.

    Connections are accepted here and not by `loop.create_server`, whose server, closed between the acceptance of a
    connection and the start of its protocol, forgets the connection and lets the client hang (Python 3.11).
    """

    def __init__(self, host: str, port: int) -> None:
        """Reserves the port. Raises OSError."""
        self.host = host
        self.port = port
        self._socket = ports.reserve(host, port)
        self._listens = False
        self._backends: tuple[Backend, ...] = ()
        self._turn = 0
        self._clients: set[_Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def set_backends(self, backends: Sequence[Backend]) -> None:
        """Where new connections go from now on; running ones are left alone. Raises OSError."""
        self._backends = tuple(backends)
        if self._listens and not self._backends:
            self._stop_listening()
        if self._backends and not self._listens:
            ports.start_listening(self._socket, backlog=_BACKLOG)
            asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)
            self._listens = True

    def _stop_listening(self) -> None:
        if self._listens:
            asyncio.get_running_loop().remove_reader(self._socket)
            ports.stop_listening(self._socket)
        self._listens = False

    def _accept(self, listener: socket.socket) -> None:
        """All connections that wait now."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # out of file descriptors: they stay in the queue for a while
                logger.warning("port %d: %s", self.port, error)
                loop.remove_reader(listener)
                loop.call_later(_ACCEPT_RETRY_SECONDS, self._accept_again, listener)
                return
            connection.setblocking(False)
            task = loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _accept_again(self, listener: socket.socket) -> None:
        if self._listens:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _serve(self, connection: socket.socket) -> None:
        """Joins an accepted connection to the next backend that answers; one that finds none is reset."""
        loop = asyncio.get_running_loop()
        client = _Client(self._clients.discard)
        self._clients.add(client)
        await loop.connect_accepted_socket(lambda: client, connection)
        backends = self._backends
        first, self._turn = self._turn, self._turn + 1
        for offset in range(len(backends)):
            host, port = backends[(first + offset) % len(backends)]
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await loop.create_connection(lambda: _Server(client), host, port)
            except OSError:  # TimeoutError is one
                continue
            return
        reset(client.transport)

    async def close(self) -> None:
        """Stops listening, gives the port back and ends all connections."""
        self._stop_listening()
        self._socket.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in list(self._clients):
            for side in (client, client.other):
                if side is not None:
                    side.abort()
