"""The HTTP servers of a pod: uvicorn with the engine's application, in plaintext or behind certificates."""

import socket
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn
from vllm import envs
from vllm.entrypoints.launchers.launcher import NoSignalServer

from specserve_workers.frontend.certified_http import certified_settings
from specserve_workers.frontend.middleware import App
from specserve_workers.identity.channels import ServerTls
from specserve_workers.startup import StartupError, port_message

# After draining, for the last bytes to reach their clients.
CLOSE_SECONDS: Final = 5
_BACKLOG: Final = 2048


def plain_server(app: App, args: Namespace) -> uvicorn.Server:
    """Serves whoever connects. The application's start and end belong to it."""
    return NoSignalServer(_config(app, args, lifespan="on"))


def certified_server(app: App, args: Namespace, tls: ServerTls) -> uvicorn.Server:
    """Serves the peers of a rule."""
    return NoSignalServer(_config(app, args, lifespan="off", **certified_settings(tls)))


def _config(app: App, args: Namespace, **settings: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level=args.uvicorn_log_level,
        access_log=False,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        **settings,
    )


@contextmanager
def listening(host: str, port: int, *, flag: str) -> Iterator[socket.socket]:
    """A socket on that port. Raises StartupError naming the flag."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartupError(port_message(flag, host, port, error=error)) from error
    with sock:
        yield sock
