"""KV over gRPC between pods: real TLS on loopback, strangers at every door."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specserve_operator.identity.authority import (
    Authority,
    AuthorityPolicy,
    AuthorityState,
    Retired,
    Successor,
    advance,
)
from specserve_operator.identity.certificates import Subject, key_pem, new_ca, new_key, to_pem
from specserve_operator.identity.names import OPERATOR_ID, PodId
from specserve_protos.v1alpha1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from specserve_workers.frontend.disaggregation import TransferParams
from specserve_workers.frontend.lease_release import LeaseReleaser
from specserve_workers.identity.channels import PeerTls, ServerTls, pool_rule
from specserve_workers.identity.material import MaterialFiles, throwaway_material
from specserve_workers.identity.names import ServiceId
from specserve_workers.kv.blocks import KvBlocks
from specserve_workers.kv.client import FetchOrder, KvClient
from specserve_workers.kv.errors import ConnectError, KvNoIdentityError, ProducerError
from specserve_workers.kv.lease import Lease, LeaseTable, new_token
from specserve_workers.kv.server import KvTransferServer, KvTransferServicer, ServerLimits
from specserve_workers.kv.stats import TransferCounters
from tests.unit.identity.builders import DECODE, PREFILL, certified_files, certify_again, make_authority
from tests.unit.kv.conftest import NUM_BLOCKS, PROMPT_SHA256, layout_of, make_cache

SERVICE = ServiceId("llm", "coder")
LIMITS = ServerLimits(lease_wait_seconds=0.2, chunk_bytes=8192)


@dataclass
class Producer:
    """A prefill pod's KV server over its own files."""

    files: MaterialFiles
    leases: LeaseTable
    blocks: KvBlocks
    server: KvTransferServer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def order(self) -> FetchOrder:
        lease = Lease(
            token=new_token(),
            request_id="r",
            block_ids=(5, 6, 2, 9),
            prompt_tokens=125,
            prompt_sha256=PROMPT_SHA256,
            pulls=1,
        )
        self.leases.grant(lease)
        return FetchOrder(
            address=self.address,
            lease=lease.token,
            first_block=0,
            block_ids=(0, 1, 2, 3),
            prompt_tokens=125,
            prompt_sha256=PROMPT_SHA256,
        )


@pytest.fixture
def authority() -> Authority:
    return make_authority()


@pytest.fixture
def make_producer(tmp_path: Path, authority: Authority) -> Iterator[Callable[..., Producer]]:
    made: list[Producer] = []

    def make(files: MaterialFiles | None = None) -> Producer:
        files = files or certified_files(tmp_path / "prefill", PREFILL, authority)
        blocks = KvBlocks(make_cache(seed=1), num_blocks=NUM_BLOCKS)
        leases = LeaseTable(lease_seconds=60)
        servicer = KvTransferServicer(
            blocks=blocks, layout=layout_of(blocks), leases=leases, counters=TransferCounters(), limits=LIMITS
        )
        tls = ServerTls(files, pool_rule(SERVICE, pool="decode"))
        server = KvTransferServer(servicer, host="127.0.0.1", port=0, limits=LIMITS, tls=tls)
        server.start()
        made.append(Producer(files, leases, blocks, server))
        return made[-1]

    yield make
    for producer in made:
        producer.leases.close()
        producer.server.stop()


@pytest.fixture
def producer(make_producer: Callable[..., Producer]) -> Producer:
    return make_producer()


@pytest.fixture
def make_consumer() -> Iterator[Callable[..., KvClient]]:
    made: list[KvClient] = []

    def make(files: MaterialFiles | None, *, service: ServiceId = SERVICE, pool: str = "prefill") -> KvClient:
        blocks = KvBlocks(make_cache(seed=None), num_blocks=NUM_BLOCKS)
        made.append(
            KvClient(
                blocks=blocks,
                layout=layout_of(blocks),
                connect_timeout_ms=5000,
                stall_timeout_ms=10_000,
                tls=None if files is None else PeerTls(files, service, pool=pool),
            )
        )
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def consumer(make_consumer: Callable[..., KvClient], tmp_path: Path, authority: Authority) -> KvClient:
    return make_consumer(certified_files(tmp_path / "decode", DECODE, authority))


def test_a_decode_pod_fetches_from_a_prefill_pod_of_its_service(producer: Producer, consumer: KvClient) -> None:
    order = producer.order()
    assert consumer.fetch(order) == 4 * layout_of(producer.blocks).block_bytes
    assert consumer.release(producer.address, producer.order().lease, pulls=0) is True


STRANGERS = {
    "another service's decode pod": PodId("llm", "other", "decode", "x"),
    "another namespace's decode pod": PodId("other", "coder", "decode", "x"),
    "a prefill pod": PREFILL,
    "the operator": OPERATOR_ID,
    "somebody with no pod's id": "spiffe://specserve.dev/ns/llm/service/coder/pool/decode",
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_certificate_of_somebody_else_is_let_in_and_shown_the_door(
    who: str, producer: Producer, make_consumer: Callable[..., KvClient], tmp_path: Path, authority: Authority
) -> None:
    client = make_consumer(certified_files(tmp_path / "stranger", STRANGERS[who], authority))
    with pytest.raises(ProducerError, match=r"only decode pods of llm/coder may call this, and the caller is spiffe:"):
        client.fetch(producer.order())
    assert client.release(producer.address, producer.order().lease, pulls=0) is False
    assert producer.leases.open_count == 2


def test_nobody_else_may_even_ask_for_health(producer: Producer, tmp_path: Path, authority: Authority) -> None:
    files = certified_files(tmp_path / "stranger", PodId("llm", "other", "decode", "x"), authority)
    tls = PeerTls(files, SERVICE, pool="prefill").current()
    with grpc.secure_channel(producer.address, tls.credentials, options=tls.options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for call in (stub.Check, lambda *a, **k: next(stub.Watch(*a, **k))):
            with pytest.raises(grpc.RpcError) as caught:
                call(health_pb2.HealthCheckRequest(), timeout=5)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("how", ["plain text", "other authority", "self-signed", "expired", "no certificate"])
def test_who_has_no_certificate_of_the_authority_gets_no_connection(
    how: str, producer: Producer, make_consumer: Callable[..., KvClient], tmp_path: Path, authority: Authority
) -> None:
    folder = tmp_path / "stranger"
    if how == "no certificate":
        credentials = grpc.ssl_channel_credentials(authority.trust_bundle.encode())
        options = (("grpc.ssl_target_name_override", SERVICE.host("prefill")),)
        with (
            grpc.secure_channel(producer.address, credentials, options=options) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            kv_transfer_pb2_grpc.KvTransferServiceStub(channel).Release(kv_transfer_pb2.ReleaseRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        return
    match how:
        case "plain text":
            files = None
        case "other authority":
            files = certified_files(folder, DECODE, make_authority(), trust=authority.trust_bundle)
        case "self-signed":
            files = MaterialFiles(folder)
            material = throwaway_material()
            files.write_trust(authority.trust_bundle.encode())
            files.write_pair(material.key_pem, material.certificate_pem)
        case "expired":
            # Of the authority, and over; its owner's clock is behind.
            ended = datetime.now(UTC) - timedelta(hours=2)
            files = MaterialFiles(folder, now=lambda: ended)
            policy = AuthorityPolicy(certificate_lifetime=timedelta(hours=1))
            state = AuthorityState(new_ca(ended, timedelta(days=1)), ended, timedelta(hours=1))
            producer.files.write_trust(Authority(state, policy).trust_bundle.encode() + producer.files.read_trust())
            _certify_at(files, Authority(state, policy), ended, trust=authority.trust_bundle)
    with pytest.raises(ConnectError):
        make_consumer(files).fetch(producer.order())
    assert producer.leases.open_count == 1


def _certify_at(files: MaterialFiles, authority: Authority, time: datetime, *, trust: str) -> None:
    key = new_key()
    certificate = authority.certify(key.public_key(), Subject(uri=DECODE.uri, hosts=DECODE.hosts), time)
    files.write_trust(trust.encode())
    files.write_pair(key_pem(key).encode(), to_pem(certificate).encode())


@pytest.mark.parametrize(
    "who",
    [
        PodId("llm", "other", "prefill", "x"),
        PodId("other", "coder", "prefill", "x"),
        PodId("llm", "coder", "decode", "x"),
    ],
    ids=["other service", "other namespace", "other pool"],
)
def test_a_decode_pod_takes_nothing_from_a_server_that_is_no_prefill_pod_of_its_service(
    who: PodId,
    make_producer: Callable[..., Producer],
    consumer: KvClient,
    tmp_path: Path,
    authority: Authority,
) -> None:
    posing = make_producer(certified_files(tmp_path / "posing", who, authority))
    with pytest.raises(ConnectError, match="Hostname Verification"):
        consumer.fetch(posing.order())
    assert posing.leases.open_count == 1, "nothing was asked of it"


def test_a_server_without_a_certificate_serves_nobody_until_it_has_one(
    make_producer: Callable[..., Producer], consumer: KvClient, tmp_path: Path, authority: Authority
) -> None:
    files = MaterialFiles(tmp_path / "late")
    late = make_producer(files)
    with pytest.raises(ConnectError):
        consumer.fetch(late.order())
    certify_again(files, PREFILL, authority)
    assert consumer.fetch(late.order()) > 0


def test_a_decode_pod_without_a_certificate_says_so(
    producer: Producer, make_consumer: Callable[..., KvClient], tmp_path: Path, authority: Authority
) -> None:
    files = MaterialFiles(tmp_path / "late")
    client = make_consumer(files)
    with pytest.raises(KvNoIdentityError, match="no certificate yet"):
        client.fetch(producer.order())
    certify_again(files, DECODE, authority)
    assert client.fetch(producer.order()) > 0


def test_a_stream_goes_on_while_both_ends_get_new_certificates(
    producer: Producer,
    make_consumer: Callable[..., KvClient],
    tmp_path: Path,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode_files = certified_files(tmp_path / "decode", DECODE, authority)
    client = make_consumer(decode_files)
    chunks, may_go_on, is_half_way = [], threading.Event(), threading.Event()
    gather = producer.blocks.gather

    def gather_slowly(layer_index: int, block_ids: Any) -> Any:
        chunks.append(layer_index)
        if len(chunks) == 3:
            is_half_way.set()
            assert may_go_on.wait(10)
        return gather(layer_index, block_ids)

    monkeypatch.setattr(producer.blocks, "gather", gather_slowly)
    order, results = producer.order(), list[int]()
    fetch = threading.Thread(target=lambda: results.append(client.fetch(order)))
    fetch.start()
    assert is_half_way.wait(10)
    certify_again(producer.files, PREFILL, authority)
    certify_again(decode_files, DECODE, authority)
    # A new connection beside the stream is made with the new certificates.
    assert client.release(producer.address, producer.order().lease, pulls=0) is True
    may_go_on.set()
    fetch.join(10)
    assert results == [4 * layout_of(producer.blocks).block_bytes]
    assert client.fetch(producer.order()) > 0


def test_no_connection_is_refused_at_any_moment_of_a_rotation(
    make_producer: Callable[..., Producer], make_consumer: Callable[..., KvClient], tmp_path: Path
) -> None:
    """Pods learn of each stage one after the other, so every pair of neighbouring stages must get along."""
    policy, now = AuthorityPolicy(), datetime.now(UTC)
    first = advance(None, now, policy)
    both = replace(first, successor=Successor(new_ca(now, policy.ca_lifetime), now))
    assert both.successor is not None
    switched = AuthorityState(
        both.successor.ca, now, policy.certificate_lifetime, retired=(Retired(first.current.certificate_pem, now),)
    )
    last = replace(switched, retired=())
    # What a pod has: whose certificate, and which bundle. Bundles go ahead; certificates follow within half a life.
    stages = [
        (Authority(first, policy), Authority(first, policy).trust_bundle),
        (Authority(first, policy), Authority(both, policy).trust_bundle),
        (Authority(switched, policy), Authority(switched, policy).trust_bundle),
        (Authority(switched, policy), Authority(last, policy).trust_bundle),
    ]
    server_files, client_files = MaterialFiles(tmp_path / "prefill"), MaterialFiles(tmp_path / "decode")
    producer, client = make_producer(server_files), make_consumer(client_files)
    for older, newer in [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)]:
        for server_stage, client_stage in ((older, newer), (newer, older)):
            signer, bundle = stages[server_stage]
            certify_again(server_files, PREFILL, signer, trust=bundle)
            signer, bundle = stages[client_stage]
            certify_again(client_files, DECODE, signer, trust=bundle)
            assert client.fetch(producer.order()) > 0, (server_stage, client_stage)


async def test_leases_are_given_back_with_the_certificate_of_now(
    producer: Producer, tmp_path: Path, authority: Authority
) -> None:
    files = certified_files(tmp_path / "decode", DECODE, authority)
    releaser = LeaseReleaser(tls=PeerTls(files, SERVICE, pool="prefill"))
    for _ in range(2):
        lease = producer.order().lease
        releaser.release(
            TransferParams(
                {"lease": lease.hex(), "host": "127.0.0.1", "port": producer.server.port, "tensor_parallel_size": 1}
            )
        )
        while releaser._calls:
            await next(iter(releaser._calls))
        assert producer.leases.open_count == 0
        certify_again(files, DECODE, authority)
    await releaser.aclose()


async def test_a_release_without_a_certificate_costs_the_leases_time_and_no_more(
    producer: Producer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    releaser = LeaseReleaser(tls=PeerTls(MaterialFiles(tmp_path / "none"), SERVICE, pool="prefill"))
    fields = {"lease": "00" * 16, "host": "127.0.0.1", "port": producer.server.port, "tensor_parallel_size": 1}
    releaser.release(TransferParams(fields))
    await releaser.aclose()
    assert "no certificate yet" in caplog.text
