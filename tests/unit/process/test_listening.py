"""On which addresses the process listens."""

import asyncio
import socket
from datetime import UTC, datetime

import aiohttp
import grpc
import pytest
from aiohttp import web

from specserve_operator.identity.operator_tls import OperatorTls
from specserve_operator.identity.service import IdentityServer
from specserve_operator.probes import probes_app, serving
from specserve_protos.v1alpha1 import identity_pb2_grpc as pb_grpc
from tests.unit.identity.builders import make_authority


def _has(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


ADDRESSES = [
    pytest.param(address, marks=pytest.mark.skipif(not _has(address), reason=f"this machine has no {address}"))
    for address in ("127.0.0.1", "::1")
]


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@pytest.mark.parametrize("address", ADDRESSES)
async def test_probes_answer_on_addresses_of_both_families(address: str) -> None:
    async with (
        serving(probes_app(live=[], ready=[]), None, 0) as port,
        aiohttp.ClientSession() as client,
        client.get(f"http://{_host(address)}:{port}/healthz") as answer,
    ):
        assert (answer.status, await answer.text()) == (200, "ok\n")


async def test_a_given_address_is_the_only_one() -> None:
    async with serving(web.Application(), "127.0.0.1", 0) as port:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5).close()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"{port}.*[Aa]ddress already in use|[Aa]ddress already in use.*{port}"):
            async with serving(web.Application(), None, port):
                pass


@pytest.mark.parametrize("address", ADDRESSES)
async def test_certificates_are_given_on_addresses_of_both_families(address: str) -> None:
    authority = make_authority()
    tls = OperatorTls(lambda: authority, hosts=("operator.ns.svc",), now=lambda: datetime.now(UTC))
    server = IdentityServer(pb_grpc.IdentityServiceServicer(), tls)
    port = await server.start(None, 0)
    try:
        credentials = grpc.ssl_channel_credentials(authority.trust_bundle.encode())
        options = (("grpc.ssl_target_name_override", "operator.ns.svc"),)
        target = f"{_host(address)}:{port}"
        async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
            async with asyncio.timeout(20):
                await channel.channel_ready()
    finally:
        await server.stop(0)
