"""The router as a child of this process, on a port of loopback that it shares with nobody."""

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Final

COMMAND: Final = "vllm-router"
HOST: Final = "127.0.0.1"
_PR_SET_PDEATHSIG: Final = 1


class RouterStartError(Exception):
    """The router cannot be started."""


class RouterProcess:
    """A router that runs, and ends with this process however that ends."""

    def __init__(self, process: asyncio.subprocess.Process, reservation: socket.socket) -> None:
        self._process = process
        self._reservation = reservation

    @classmethod
    async def start(cls, flags: Sequence[str]) -> "RouterProcess":
        """Starts it with `flags` and an address. Raises RouterStartError. To be called in the main thread."""
        reservation = _reserve_port()
        address = ("--host", HOST, "--port", str(reservation.getsockname()[1]))
        try:
            process = await asyncio.create_subprocess_exec(COMMAND, *flags, *address, preexec_fn=_die_with_parent())
        except OSError as error:
            reservation.close()
            raise RouterStartError(f"{COMMAND} cannot be started: {os.strerror(error.errno or 0)}") from error
        return cls(process, reservation)

    @property
    def port(self) -> int:
        return int(self._reservation.getsockname()[1])

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Passes a signal on; nothing if it has ended."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit code once it has ended; 128 and the number of the signal if one ended it."""
        code = await self._process.wait()
        self._reservation.close()
        return code if code >= 0 else 128 - code


def _reserve_port() -> socket.socket:
    """A free port that the system gives nobody else while the socket is open.

    Who asks for this very port and, as every server does, for SO_REUSEADDR, can still listen there: nobody else does.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((HOST, 0))
    return reservation


def _die_with_parent() -> Callable[[], None]:
    """What the child does before it becomes the router: it asks the kernel for SIGKILL when this process is gone.

    All that it needs is made here: between fork and exec little is safe.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    return prepare
