"""The gateway's process: listens, starts the router, and ends with it."""

import asyncio
import logging
import os
import resource
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Final

from specserve_workers.gateway.connection import ClientConnection
from specserve_workers.gateway.flags import GatewayFlags
from specserve_workers.gateway.router import COMMAND, HOST, RouterProcess, RouterStartError
from specserve_workers.gateway.settings import GuardSettings

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_CHECK_SECONDS: Final = 1.0
_FLUSH_CHECK_SECONDS: Final = 0.02
# Of each client's connection and its own to the router; and for all else that a process has open.
_FILES_PER_CONNECTION: Final = 2
_OTHER_FILES: Final = 64
# A client that has vanished without a word is found out after about two minutes, whatever it waits for.
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 4),
)


class GatewayError(Exception):
    """The gateway cannot serve, or its router has ended. `code` is the process's exit code."""

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Gateway:
    """Listens for clients while a router runs."""

    def __init__(self, settings: GuardSettings, *, router_port: int) -> None:
        self.settings = settings
        self.router_port = router_port
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None

    def add(self, connection: ClientConnection) -> int:
        self._connections.add(connection)
        return len(self._connections)

    def remove(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)

    async def listen(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ClientConnection(self), sock=sock, backlog=_BACKLOG)

    async def watch_deadlines(self) -> None:
        """Ends the connections whose clients let their time pass; to be cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_CHECK_SECONDS, self.settings.head_seconds / 4))
            now = loop.time()
            for connection in tuple(self._connections):
                connection.check_deadline(now)

    def stop_listening(self) -> None:
        """Takes no new connections and closes those on which nothing runs. The others end as the router does."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            if connection.is_idle:
                connection.end()

    async def finish(self) -> None:
        """Once the router has ended: what it has written reaches the clients, then everything is closed."""
        self.stop_listening()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.flush_seconds):
                while not all(connection.is_flushed for connection in self._connections):  # noqa: ASYNC110
                    await asyncio.sleep(_FLUSH_CHECK_SECONDS)
        for connection in tuple(self._connections):
            connection.abort()


async def serve(flags: GatewayFlags) -> int:
    """Serves until told to stop; the exit code.

    Raises:
        GatewayError: the gateway cannot start, or the router has ended by itself.
    """
    settings = replace(flags.settings, max_connections=_affordable_connections(flags.settings))
    with _listening_socket(flags.host, flags.http_port) as sock:
        try:
            router = await RouterProcess.start(flags.router_flags)
        except RouterStartError as error:
            raise GatewayError(str(error)) from error
        gateway = Gateway(settings, router_port=router.port)
        is_stopping = _stop_with(gateway, router)
        await gateway.listen(sock)
        logger.info("%s, pid %d, listens on %s:%d", COMMAND, router.pid, HOST, router.port)
        logger.info("listens on %s:%d", flags.host, flags.http_port)
        watch = asyncio.create_task(gateway.watch_deadlines())
        code = await router.wait()
        watch.cancel()
        await gateway.finish()
    if is_stopping.is_set():
        logger.info("%s has ended with exit code %d", COMMAND, code)
        # It may have been told so before it could listen to signals.
        return 0 if code == 128 + signal.SIGTERM else code
    raise GatewayError(f"{COMMAND} ended by itself with exit code {code}", code=code or 1)


def _stop_with(gateway: Gateway, router: RouterProcess) -> asyncio.Event:
    """Passes signals to stop on to the router, which lets running requests finish. The event says that one came."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        stopping.set()
        gateway.stop_listening()
        router.signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return stopping


def _listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise GatewayError(f"--http-port {port}: cannot listen on {host}:{port}: {reason}") from error
    # Connections have what the socket has that they come in by.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def _affordable_connections(settings: GuardSettings) -> int:
    """As many as are wanted, if the process may have so many files open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return settings.max_connections
    affordable = (most - _OTHER_FILES) // _FILES_PER_CONNECTION - settings.spare_connections
    if affordable < settings.max_connections:
        logger.warning("%d connections at most: the limit of open files is %d", affordable, most)
    return max(1, min(settings.max_connections, affordable))
