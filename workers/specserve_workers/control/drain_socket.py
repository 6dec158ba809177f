"""By what the stop hook has a pod drain: a socket that only the pod's own processes can reach."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from specserve_workers.control.drain import DrainState
from specserve_workers.drain import DIRECTORY_VARIABLE, short_name
from specserve_workers.startup import StartupError

_LAST_WORD_SECONDS: Final = 1


@contextmanager
def _drain_socket(path: Path) -> Iterator[socket.socket]:
    """Makes the socket, for this user alone. Nothing listens yet. Raises StartupError."""
    with ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.parent.stat().st_uid != os.geteuid():
                text = f"{path.parent}: belongs to somebody else; name another folder in {DIRECTORY_VARIABLE}"
                raise StartupError(text)
            # Left behind by a container that was killed.
            path.unlink(missing_ok=True)
            sock.bind(stack.enter_context(short_name(path)))
            path.chmod(0o600)
        except OSError as error:
            raise StartupError(f"{path}: the stop hook's socket cannot be made: {error.strerror}") from error
        try:
            yield sock
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


@asynccontextmanager
async def drain_on_request(path: Path, drain: DrainState, *, timeout_seconds: float) -> AsyncIterator[None]:
    """While in the body, whoever connects has the pod drain. It is told when that is over, in a line of JSON.

    Raises:
        StartupError: the socket cannot be made.
    """
    hooks: set[asyncio.Task[None]] = set()

    async def answer(writer: asyncio.StreamWriter) -> None:
        drained = await drain.wait(timeout_seconds)
        with suppress(ConnectionError):
            writer.write(json.dumps({"drained": drained, "running": drain.running}).encode() + b"\n")
            await writer.drain()
        writer.close()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Goes on if the hook goes away: there is no way back from draining.
        task = asyncio.create_task(answer(writer))
        hooks.add(task)
        task.add_done_callback(hooks.discard)

    with _drain_socket(path) as sock:
        server = await asyncio.start_unix_server(connected, sock=sock)
        try:
            yield
        finally:
            server.close()
            # Those that wait still hear how it ended; none waits longer than the one who closes.
            if hooks:
                _, late = await asyncio.wait(hooks, timeout=_LAST_WORD_SECONDS)
                for task in late:
                    task.cancel()
