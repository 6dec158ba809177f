"""The certificate service over real gRPC and TLS on loopback: what pods get, and what everybody else is told."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from specserve_operator.identity.authority import Authority, AuthorityPolicy, advance
from specserve_operator.identity.certificates import read_certificate
from specserve_operator.identity.issuer_keys import IssuerKeys
from specserve_operator.identity.names import TOKEN_AUDIENCE, PodId
from specserve_operator.identity.operator_tls import OperatorTls
from specserve_operator.identity.pods import PodRefusedError
from specserve_operator.identity.service import (
    CallLimits,
    IdentityPortError,
    IdentityServer,
    IdentityServicer,
)
from specserve_operator.identity.tokens import PodClaims, TokenVerifier
from specserve_protos.v1alpha1 import identity_pb2 as pb
from specserve_protos.v1alpha1 import identity_pb2_grpc as pb_grpc
from specserve_workers.identity.certify import CertificateClient, CertifyError
from specserve_workers.identity.keeper import IdentityKeeper
from specserve_workers.identity.material import MaterialFiles
from specserve_workers.identity.names import PodId as WorkerPodId
from tests.unit.identity.builders import DECODE, FakeIssuer, make_authority, signing_request


def now() -> datetime:
    return datetime.now(UTC)


class Operator:
    """The service with an issuer of tokens beside it. `pods` are those that it knows."""

    def __init__(self, *, limits: CallLimits | None = None, hosts: tuple[str, ...] = ("localhost",)) -> None:
        self.issuer = FakeIssuer()
        self.authority = make_authority()
        self.pods: dict[str, PodId | Exception] = {DECODE.uid: DECODE}
        self.outcomes: list[str] = []
        self.tls = OperatorTls(lambda: self.authority, hosts=hosts, now=now)
        self.servicer = IdentityServicer(
            TokenVerifier(IssuerKeys(self.issuer, lambda: 0.0), audience=TOKEN_AUDIENCE),
            self.find_pod,
            authority=lambda: self.authority,
            now=now,
            limits=limits,
            on_call=self.outcomes.append,
        )
        self.server = IdentityServer(self.servicer, self.tls)
        self.port = 0

    def find_pod(self, claims: PodClaims) -> PodId | None:
        found = self.pods.get(claims.pod_uid)
        if isinstance(found, Exception):
            raise found
        return found

    def token(self, **changes: Any) -> str:
        return self.issuer.token(now=now(), **changes)

    async def start(self) -> "Operator":
        self.port = await self.server.start("127.0.0.1", 0)
        return self

    async def call(self, *, token: str | None = None, request: bytes | None = None) -> pb.CertifyResponse:
        """As a pod that trusts the authority of now."""
        credentials = grpc.ssl_channel_credentials(self.authority.trust_bundle.encode())
        async with grpc.aio.secure_channel(f"localhost:{self.port}", credentials) as channel:
            message = pb.CertifyRequest(
                token=self.token() if token is None else token,
                signing_request=signing_request() if request is None else request,
            )
            answer: pb.CertifyResponse = await pb_grpc.IdentityServiceStub(channel).Certify(message, timeout=10)
            return answer

    async def refusal(self, **call: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(**call)
        return caught.value.code(), caught.value.details() or ""


@pytest.fixture
async def make_operator() -> AsyncIterator[Callable[..., Any]]:
    made: list[Operator] = []

    async def make(**options: Any) -> Operator:
        made.append(Operator(**options))
        return await made[-1].start()

    yield make
    for operator in made:
        await operator.server.stop(0)


@pytest.fixture
async def operator(make_operator: Callable[..., Any]) -> Operator:
    started: Operator = await make_operator()
    return started


@pytest.fixture
def make_client(tmp_path: Path) -> Callable[..., CertificateClient]:
    def make(operator: Operator, *, host: str = "localhost", token: str | None = None) -> CertificateClient:
        file = tmp_path / "token"
        file.write_text((operator.token() if token is None else token) + "\n")
        return CertificateClient(f"{host}:{operator.port}", file)

    return make


async def test_a_pod_gets_a_certificate_that_says_who_it_is_and_nothing_more(operator: Operator) -> None:
    answer = await operator.call()
    certificate = read_certificate(answer.certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [DECODE.uri, *DECODE.hosts]
    certificate.verify_directly_issued_by(read_certificate(operator.authority.trust_bundle))
    assert answer.trust_bundle_pem == operator.authority.trust_bundle
    assert operator.outcomes == ["issued"]


async def test_a_worker_gets_its_certificate_from_the_operator(
    operator: Operator, make_client: Callable[..., CertificateClient], tmp_path: Path
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text(operator.authority.trust_bundle)
    files = MaterialFiles(tmp_path / "identity")
    pod = WorkerPodId(DECODE.namespace, DECODE.service, DECODE.pool, DECODE.uid)
    keeper = IdentityKeeper(make_client(operator), files, bundle_file=bundle, pod=pod)
    keeper.start()
    try:
        assert await asyncio.to_thread(keeper.wait_for_certificate, 10)
    finally:
        keeper.stop()
    assert files.current().uris == (DECODE.uri,)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("", "not a signed JSON web token"),
        ("a.b.c", "not a signed JSON web token"),
        ("x" * 9000, "characters"),
    ],
)
async def test_no_token_no_certificate(operator: Operator, token: str, reason: str) -> None:
    code, details = await operator.refusal(token=token)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert reason in details
    assert operator.outcomes == ["UNAUTHENTICATED"]


async def test_a_token_for_somebody_else_is_of_no_use_here(operator: Operator) -> None:
    code, details = await operator.refusal(token=operator.token(aud=["https://kubernetes.default.svc"]))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "audience specserve.dev/identity" in details


async def test_a_pod_that_is_not_known_yet_is_told_to_try_again(operator: Operator) -> None:
    operator.pods.clear()
    code, details = await operator.refusal()
    assert (code, details) == (
        grpc.StatusCode.NOT_FOUND,
        "pod llm/coder-decode-1 is not known yet; try again",
    )


async def test_a_pod_that_may_not_have_one_is_told_why(operator: Operator) -> None:
    operator.pods[DECODE.uid] = PodRefusedError("pod coder-decode-1 has ended")
    assert await operator.refusal() == (grpc.StatusCode.PERMISSION_DENIED, "pod coder-decode-1 has ended")


async def test_a_bad_signing_request_is_the_callers_fault(operator: Operator) -> None:
    code, details = await operator.refusal(request=b"\x30\x03\x02\x01\x00")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "PKCS #10" in details


async def test_without_the_clusters_keys_everybody_is_told_to_come_back(operator: Operator) -> None:
    operator.issuer.is_down = True
    code, details = await operator.refusal()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "API server" not in details, "what is wrong inside is nobody's business"


async def test_a_message_of_any_size_is_cut_off(operator: Operator) -> None:
    code, _ = await operator.refusal(request=b"x" * (1 << 20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert operator.outcomes == []


async def test_one_pod_cannot_have_certificates_without_end(make_operator: Callable[..., Any]) -> None:
    operator = await make_operator(limits=CallLimits(pod_burst=3, pod_per_second=0))
    for _ in range(3):
        await operator.call()
    code, details = await operator.refusal()
    assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many certificates for this pod")


async def test_one_address_cannot_keep_the_service_busy(make_operator: Callable[..., Any]) -> None:
    operator = await make_operator(limits=CallLimits(address_burst=3, address_per_second=0))
    for _ in range(3):
        await operator.refusal(token="x")
    code, details = await operator.refusal()
    assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls from this address")
    assert operator.issuer.reads == 0


async def test_a_flood_of_refusals_does_not_flood_the_log(
    make_operator: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    operator = await make_operator()
    with caplog.at_level(logging.WARNING):
        credentials = grpc.ssl_channel_credentials(operator.authority.trust_bundle.encode())
        async with grpc.aio.secure_channel(f"localhost:{operator.port}", credentials) as channel:
            stub = pb_grpc.IdentityServiceStub(channel)
            for _ in range(90):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Certify(pb.CertifyRequest(token="x"), timeout=10)
    assert 1 <= caplog.text.count("no certificate for") < 45


async def test_a_pod_does_not_give_its_token_to_a_server_it_does_not_trust(
    operator: Operator, make_client: Callable[..., CertificateClient]
) -> None:
    stranger = make_authority()
    with pytest.raises(CertifyError, match="--identity-server localhost"):
        await asyncio.to_thread(make_client(operator).certify, stranger.trust_bundle.encode())
    assert operator.outcomes == []


async def test_nor_to_a_server_of_another_name(
    make_operator: Callable[..., Any], make_client: Callable[..., CertificateClient]
) -> None:
    operator = await make_operator(hosts=("specserve-operator.specserve.svc",))
    with pytest.raises(CertifyError):
        await asyncio.to_thread(make_client(operator).certify, operator.authority.trust_bundle.encode())
    assert operator.outcomes == []


async def test_nor_to_a_pod_that_poses_as_the_operator(
    make_operator: Callable[..., Any], make_client: Callable[..., CertificateClient]
) -> None:
    """Certificates of pods have names that nobody is reached by."""
    operator = await make_operator(hosts=DECODE.hosts)
    with pytest.raises(CertifyError):
        await asyncio.to_thread(make_client(operator).certify, operator.authority.trust_bundle.encode())


async def test_plain_text_is_not_answered(operator: Operator) -> None:
    async with grpc.aio.insecure_channel(f"localhost:{operator.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.IdentityServiceStub(channel).Certify(pb.CertifyRequest(token=operator.token()), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_token_that_is_not_there_is_named_with_its_flag(operator: Operator, tmp_path: Path) -> None:
    client = CertificateClient(f"localhost:{operator.port}", tmp_path / "missing")
    with pytest.raises(CertifyError, match="--identity-token"):
        client.certify(operator.authority.trust_bundle.encode())


async def test_the_server_goes_over_to_another_authority_without_a_restart(operator: Operator) -> None:
    await operator.call()
    before = operator.authority
    operator.authority = make_authority()
    await operator.call()
    operator.authority = before
    await operator.call()


async def test_during_a_rotation_pods_that_know_only_one_of_two_authorities_are_served(operator: Operator) -> None:
    """A pod whose mounted bundle is old, and one whose is new: the server shows what both can check."""
    policy = AuthorityPolicy(propagation=timedelta(hours=1))
    first = advance(None, now() - timedelta(days=180), policy)
    both = advance(first, now(), policy)
    assert both.successor is not None
    operator.authority = Authority(both, policy)
    credentials = grpc.ssl_channel_credentials(first.current.certificate_pem.encode())
    async with grpc.aio.secure_channel(f"localhost:{operator.port}", credentials) as channel:
        message = pb.CertifyRequest(token=operator.token(), signing_request=signing_request())
        answer = await pb_grpc.IdentityServiceStub(channel).Certify(message, timeout=10)
    assert both.successor.ca.certificate_pem in answer.trust_bundle_pem


async def test_a_port_in_use_is_refused_by_its_flag(operator: Operator) -> None:
    with pytest.raises(IdentityPortError, match=f"--identity-port {operator.port}"):
        await IdentityServer(operator.servicer, operator.tls).start("127.0.0.1", operator.port)


async def test_many_pods_at_once_are_all_served(operator: Operator) -> None:
    pods = [PodId("llm", "coder", "decode", f"pod-{number}") for number in range(60)]
    operator.pods = {pod.uid: pod for pod in pods}
    claims = [
        {"namespace": "llm", "pod": {"name": pod.uid, "uid": pod.uid}, "serviceaccount": {"name": "default"}}
        for pod in pods
    ]
    answers = await asyncio.gather(*(operator.call(token=operator.token(**{"kubernetes.io": c})) for c in claims))
    uris = [
        read_certificate(answer.certificate_pem)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value.get_values_for_type(x509.UniformResourceIdentifier)
        for answer in answers
    ]
    assert uris == [[pod.uri] for pod in pods]
