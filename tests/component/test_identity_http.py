"""The prefill pod's HTTP behind certificates, and decode pods' calls to it: real TLS on loopback."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from specserve_operator.identity.authority import Authority
from specserve_operator.identity.names import OPERATOR_ID, PodId
from specserve_workers.control.stats import FallbackCause
from specserve_workers.frontend.certified_http import certified_settings
from specserve_workers.frontend.plain_port import refuse_over_plaintext
from specserve_workers.frontend.prefill_client import PrefillClient, PrefillResult
from specserve_workers.identity.channels import ServerTls, pool_rule
from specserve_workers.identity.contexts import PeerContext
from specserve_workers.identity.material import MaterialFiles, throwaway_material
from specserve_workers.identity.names import ServiceId
from tests.component.asgi_harness import LEASE, EngineApp, answer_json, ask
from tests.unit.identity.builders import DECODE, PREFILL, certified_files, certify_again, make_authority

SERVICE = ServiceId("llm", "coder")
PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "x" * 200, "max_tokens": 1}
PARAMS = {
    "do_remote_prefill": True,
    "lease": LEASE,
    "host": "127.0.0.1",
    "port": 9100,
    "tensor_parallel_size": 1,
    "revision": "t1",
    "prompt_tokens": 40,
    "prompt_sha256": "ab" * 32,
    "num_blocks": 2,
}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class PrefillPod:
    """An engine's application behind the certificates in `files`."""

    files: MaterialFiles
    app: EngineApp = field(default_factory=EngineApp)
    address: str = ""

    async def answer(self, scope: Any, send: Any) -> None:
        await answer_json(scope, send, document={"kv_transfer_params": PARAMS})


@pytest.fixture
def authority() -> Authority:
    return make_authority()


@pytest.fixture
async def make_pod(tmp_path: Path, authority: Authority) -> AsyncIterator[Callable[..., Any]]:
    running: list[tuple[_Server, asyncio.Task[None]]] = []

    async def make(files: MaterialFiles | None = None) -> PrefillPod:
        pod = PrefillPod(files or certified_files(tmp_path / f"prefill-{len(running)}", PREFILL, authority))
        pod.app.respond = pod.answer
        tls = ServerTls(pod.files, pool_rule(SERVICE, pool="decode"))
        config = uvicorn.Config(pod.app, lifespan="off", log_config=None, access_log=False, **certified_settings(tls))
        server, sock = _Server(config), socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        await asyncio.wait_for(server.is_up.wait(), 10)
        pod.address = f"127.0.0.1:{sock.getsockname()[1]}"
        running.append((server, task))
        return pod

    yield make
    for server, task in running:
        server.should_exit = server.force_exit = True
        await task


@pytest.fixture
async def pod(make_pod: Callable[..., Any]) -> PrefillPod:
    made: PrefillPod = await make_pod()
    return made


@pytest.fixture
async def make_client() -> AsyncIterator[Callable[..., Any]]:
    made: list[PrefillClient] = []

    async def make(files: MaterialFiles | None, *addresses: str, service: ServiceId = SERVICE) -> PrefillClient:
        async def peers() -> tuple[str, ...]:
            return addresses

        tls = None if files is None else PeerContext(files, service, pool="prefill")
        made.append(PrefillClient(peers, target_revision="t1", connect_timeout_seconds=5.0, tls=tls))
        await made[-1].start()
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


async def prefill(client: PrefillClient) -> PrefillResult:
    return await client.prefill(PATH, BODY, headers={"x-request-id": "r"})


async def test_a_decode_pods_prompt_is_prefilled_over_tls(
    pod: PrefillPod, make_client: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    client = await make_client(certified_files(tmp_path / "decode", DECODE, authority), pod.address)
    result = await prefill(client)
    assert result.params is not None
    assert result.params.lease.hex() == LEASE
    assert pod.app.bodies == [BODY]


@pytest.mark.parametrize(
    "who",
    [
        PodId("llm", "other", "decode", "x"),
        PodId("other", "coder", "decode", "x"),
        PodId("llm", "coder", "prefill", "x"),
        OPERATOR_ID,
    ],
    ids=["other service", "other namespace", "other pool", "operator"],
)
async def test_a_certificate_of_somebody_else_is_told_so_and_reaches_no_engine(
    who: PodId | str, pod: PrefillPod, make_client: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    files = certified_files(tmp_path / "stranger", who, authority)
    assert (await prefill(await make_client(files, pod.address))).cause is FallbackCause.PREFILL_REFUSED
    context = PeerContext(files, SERVICE, pool="prefill")
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"https://{pod.address}{PATH}",
            json=BODY,
            ssl=context.current(),
            server_hostname=context.server_name,
        ) as response,
    ):
        assert response.status == 403
        message = (await response.json())["error"]["message"]
    uri = who if isinstance(who, str) else who.uri
    assert message == f"only decode pods of llm/coder may call this, and the caller is {uri}"
    assert pod.app.bodies == []


async def test_an_upgrade_to_a_websocket_is_no_way_around(
    pod: PrefillPod, tmp_path: Path, authority: Authority
) -> None:
    files = certified_files(tmp_path / "stranger", PodId("llm", "other", "decode", "x"), authority)
    context = PeerContext(files, SERVICE, pool="prefill")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(
                f"https://{pod.address}/v1/realtime", ssl=context.current(), server_hostname=context.server_name
            )
    assert caught.value.status == 403


@pytest.mark.parametrize("how", ["other authority", "self-signed", "plain text"])
async def test_who_has_no_certificate_of_the_authority_gets_no_connection(
    how: str, pod: PrefillPod, make_client: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    files: MaterialFiles | None = MaterialFiles(tmp_path / "stranger")
    assert files is not None
    match how:
        case "other authority":
            certify_again(files, DECODE, make_authority(), trust=authority.trust_bundle)
        case "self-signed":
            material = throwaway_material()
            files.write_trust(authority.trust_bundle.encode())
            files.write_pair(material.key_pem, material.certificate_pem)
        case "plain text":
            files = None
    assert (await prefill(await make_client(files, pod.address))).cause is FallbackCause.PREFILL_ERROR
    assert pod.app.bodies == []


async def test_an_expired_certificate_gets_no_connection(
    pod: PrefillPod, make_client: Callable[..., Any], tmp_path: Path
) -> None:
    brief = make_authority(lifetime=timedelta(seconds=1))
    pod.files.write_trust(brief.trust_bundle.encode() + pod.files.read_trust())
    files = certified_files(tmp_path / "decode", DECODE, brief, trust=pod.files.read_trust().decode())
    # Its owner does not look at the time.
    files._now = lambda: files._material.not_before if files._material else brief._ca.not_valid_before_utc
    client = await make_client(files, pod.address)
    await asyncio.sleep(1.1)
    assert (await prefill(client)).cause is FallbackCause.PREFILL_ERROR
    assert pod.app.bodies == []


async def test_no_certificate_at_all_gets_no_connection(pod: PrefillPod, authority: Authority) -> None:
    context = ssl.create_default_context(cadata=authority.trust_bundle)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(
                f"https://{pod.address}{PATH}", json=BODY, ssl=context, server_hostname=SERVICE.host("prefill")
            )
    assert pod.app.bodies == []


@pytest.mark.parametrize(
    "who",
    [
        PodId("llm", "other", "prefill", "x"),
        PodId("other", "coder", "prefill", "x"),
        PodId("llm", "coder", "decode", "x"),
    ],
    ids=["other service", "other namespace", "other pool"],
)
async def test_a_prompt_is_not_sent_to_who_is_no_prefill_pod_of_the_service(
    who: PodId, make_pod: Callable[..., Any], make_client: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    posing = await make_pod(certified_files(tmp_path / "posing", who, authority))
    client = await make_client(certified_files(tmp_path / "decode", DECODE, authority), posing.address)
    assert (await prefill(client)).cause is FallbackCause.PREFILL_IDENTITY
    assert posing.app.bodies == []
    assert (await prefill(client)).cause is FallbackCause.PEERS_EXCLUDED


async def test_a_prompt_is_not_sent_in_plain_text_to_a_pod_that_speaks_no_tls(
    make_client: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    received: list[bytes] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1 << 16))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = await make_client(certified_files(tmp_path / "decode", DECODE, authority), address)
        assert (await prefill(client)).cause is FallbackCause.PREFILL_IDENTITY
    assert all(BODY["prompt"].encode() not in data for data in received)  # type: ignore[attr-defined]


async def test_a_prefill_pod_is_out_of_reach_until_it_has_its_certificate(
    make_pod: Callable[..., Any], make_client: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    files = MaterialFiles(tmp_path / "late")
    late = await make_pod(files)
    client = await make_client(certified_files(tmp_path / "decode", DECODE, authority), late.address)
    assert (await prefill(client)).cause is FallbackCause.PREFILL_IDENTITY
    certify_again(files, PREFILL, authority)
    client._rotation._excluded_until.clear()
    assert (await prefill(client)).params is not None


async def test_a_decode_pod_without_a_certificate_prefills_by_itself_and_counts_why(
    pod: PrefillPod, make_client: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    files = MaterialFiles(tmp_path / "late")
    client = await make_client(files, pod.address)
    assert (await prefill(client)).cause is FallbackCause.NO_IDENTITY
    certify_again(files, DECODE, authority)
    assert (await prefill(client)).params is not None


async def test_an_answer_goes_on_while_both_ends_get_new_certificates_and_authorities(
    pod: PrefillPod, make_client: Callable[..., Any], tmp_path: Path, authority: Authority
) -> None:
    files = certified_files(tmp_path / "decode", DECODE, authority)
    client = await make_client(files, pod.address)
    may_go_on = asyncio.Event()

    async def slowly(scope: Any, send: Any) -> None:
        await may_go_on.wait()
        await pod.answer(scope, send)

    pod.app.respond = slowly
    call = asyncio.create_task(prefill(client))
    await pod.app.until_asked()
    other = make_authority()
    certify_again(pod.files, PREFILL, other)
    certify_again(files, DECODE, other)
    pod.app.respond = pod.answer
    assert (await prefill(client)).params is not None, "a new connection, by the new authority"
    may_go_on.set()
    assert (await call).params is not None
    # And the authority of before is not trusted any more.
    certify_again(files, DECODE, authority, trust=other.trust_bundle)
    assert (await prefill(client)).cause is FallbackCause.PREFILL_ERROR


async def test_a_connection_ends_with_the_certificate_it_was_made_with(pod: PrefillPod, tmp_path: Path) -> None:
    brief = make_authority(lifetime=timedelta(seconds=2))
    pod.files.write_trust(brief.trust_bundle.encode() + pod.files.read_trust())
    files = certified_files(tmp_path / "decode", DECODE, brief, trust=pod.files.read_trust().decode())
    context = PeerContext(files, SERVICE, pool="prefill")
    host, port = pod.address.split(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=context.current(), server_hostname=context.server_name
    )
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    assert b"200" in await reader.readline()
    # Nothing is sent any more: only the end of the certificate closes it so soon.
    assert await asyncio.wait_for(reader.read(), 4) is not None
    assert reader.at_eof()
    writer.close()


async def test_resumption_is_not_offered(pod: PrefillPod, tmp_path: Path, authority: Authority) -> None:
    """A resumed session would not be asked for its certificate again."""
    files = certified_files(tmp_path / "decode", DECODE, authority)
    context = PeerContext(files, SERVICE, pool="prefill")
    host, port = pod.address.split(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=context.current(), server_hostname=context.server_name
    )
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    assert b"200" in await reader.readline()
    connection = writer.get_extra_info("ssl_object")
    assert connection.version() == "TLSv1.3"
    session = connection.session
    assert session is None or not session.has_ticket
    writer.close()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_and_metrics_stay_on_the_plaintext_port(path: str) -> None:
    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await answer_json(scope, send)

    assert (await ask(refuse_over_plaintext(engine, https_port=8443), path, method="GET")).status == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/models", "/", "/drain", "/health/", "/healthz", "//health", "/metrics/../v1/models"],
)
async def test_nothing_else_does(path: str) -> None:
    engine = EngineApp()
    answer = await ask(refuse_over_plaintext(engine, https_port=8443), path, BODY)
    assert answer.status == 403
    assert answer.json["error"]["message"].startswith("Requests to this pod are encrypted: port 8443")
    assert engine.bodies == []


async def test_a_websocket_is_closed_on_the_plaintext_port() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    await refuse_over_plaintext(EngineApp(), https_port=8443)({"type": "websocket", "path": "/health"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
