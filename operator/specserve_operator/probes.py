"""HTTP for the kubelet and Prometheus: /healthz, /readyz and /metrics."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

# Names what is wrong; None if nothing is. Must not wait for anything.
Check = Callable[[], str | None]


def _answer(checks: Iterable[Check]) -> web.Response:
    problems = [problem for check in checks if (problem := check()) is not None]
    return web.Response(text="\n".join(problems or ["ok"]) + "\n", status=503 if problems else 200)


def probes_app(*, live: Iterable[Check], ready: Iterable[Check]) -> web.Application:
    """Liveness and readiness. A check that fails makes the answer 503, with its words."""

    async def healthz(_: web.Request) -> web.Response:
        return _answer(live)

    async def readyz(_: web.Request) -> web.Response:
        return _answer([*live, *ready])

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    return app


def metrics_app(render: Callable[[], Awaitable[bytes]]) -> web.Application:
    """`render` makes the text of /metrics."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=await render(), content_type="text/plain", charset="utf-8")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    return app


@asynccontextmanager
async def serving(app: web.Application, host: str | None, port: int) -> AsyncIterator[int]:
    """Serves `app` on `port`, 0 for any that is free; on all addresses unless `host` is given. Gives the port.

    Raises OSError.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.SockSite(runner, _all_addresses(port)) if host is None else web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _all_addresses(port: int) -> socket.socket:
    """Listens on IPv6 and IPv4, or on IPv4 alone where there is nothing else."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
