"""`IdentityService`: a pod shows its token and a signing request, and gets a certificate.

Everybody in the cluster can reach it and send what they like. So messages are small, calls at once few, and each
address and each pod has a rate; no message to a caller tells more than what is wrong with the call itself.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc

from specserve_operator.identity.authority import Authority
from specserve_operator.identity.certificates import SigningRequestError, Subject, public_key_of, to_pem
from specserve_operator.identity.issuer_keys import KeysUnavailableError
from specserve_operator.identity.limits import RateLimit
from specserve_operator.identity.names import PodId
from specserve_operator.identity.operator_tls import OperatorTls
from specserve_operator.identity.pods import PodRefusedError
from specserve_operator.identity.tokens import PodClaims, TokenError, TokenVerifier
from specserve_protos.v1alpha1 import identity_pb2 as pb
from specserve_protos.v1alpha1 import identity_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_LOG = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 16 << 10
MAX_CALLS: Final = 256
# Refusals in the log, whoever they are for: at once, and a second in the long run.
_LOG_BURST: Final = 20.0
_LOG_PER_SECOND: Final = 1.0
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Pods call twice a day: a connection that stays open has another purpose.
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 10_000),
)

# On IPv4 too, where there is any.
_ALL_ADDRESSES: Final = "::"

# The pod of these claims as the cluster knows it. None: not known (yet). Raises `PodRefusedError`.
FindPod = Callable[[PodClaims], PodId | None]
# Outcome of a call, for the metrics: "issued" or the name of a gRPC status.
OnCall = Callable[[str], None]


class IdentityPortError(OSError):
    """The port cannot be listened on. The message names it."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Calls from one address, whoever sends them, and certificates for one pod: at once, and a second in the long run.

    Some networks show all pods of a node under one address. A pod renews its certificate twice in its life, and tries
    again every few seconds while that fails.
    """

    address_burst: float = 300.0
    address_per_second: float = 20.0
    pod_burst: float = 10.0
    pod_per_second: float = 0.2


class IdentityServicer(pb_grpc.IdentityServiceServicer):
    """The decisions. `authority` gives the authority of now; `clock` is in seconds and never goes backwards."""

    def __init__(
        self,
        verifier: TokenVerifier,
        find_pod: FindPod,
        *,
        authority: Callable[[], Authority],
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
        limits: CallLimits | None = None,
        on_call: OnCall = lambda outcome: None,
    ) -> None:
        limits = limits or CallLimits()
        self._verifier = verifier
        self._find_pod = find_pod
        self._authority = authority
        self._now = now
        self._clock = clock
        self._on_call = on_call
        self._by_address = RateLimit(limits.address_burst, limits.address_per_second)
        self._by_pod = RateLimit(limits.pod_burst, limits.pod_per_second)
        self._by_log_line = RateLimit(_LOG_BURST, _LOG_PER_SECOND)

    async def Certify(  # noqa: N802 - the name of the RPC
        self, request: pb.CertifyRequest, context: "Context"
    ) -> pb.CertifyResponse:
        """See identity.proto for the statuses."""
        if not self._by_address.take(_address(context.peer()), self._clock()):
            await self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls from this address")
        try:
            pod = await self._pod_of(request.token, context)
            public_key = public_key_of(request.signing_request)
        except TokenError as error:
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        except KeysUnavailableError as error:
            _LOG.warning("no pod gets a certificate: %s", error)
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, "tokens cannot be checked at the moment")
        except PodRefusedError as error:
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, str(error))
        except SigningRequestError as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        authority = self._authority()
        certificate = authority.certify(public_key, Subject(uri=pod.uri, hosts=pod.hosts), self._now())
        _LOG.info("certificate for %s until %s", pod.uri, certificate.not_valid_after_utc.isoformat())
        self._on_call("issued")
        return pb.CertifyResponse(certificate_pem=to_pem(certificate), trust_bundle_pem=authority.trust_bundle)

    async def _pod_of(self, token: str, context: "Context") -> PodId:
        claims = await self._verifier.verify(token)
        if not self._by_pod.take(claims.pod_uid, self._clock()):
            await self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many certificates for this pod")
        pod = self._find_pod(claims)
        if pod is None:
            text = f"pod {claims.namespace}/{claims.pod_name} is not known yet; try again"
            await self._refuse(context, grpc.StatusCode.NOT_FOUND, text)
        return pod

    async def _refuse(self, context: "Context", code: grpc.StatusCode, details: str) -> NoReturn:
        self._on_call(code.name)
        if code is not grpc.StatusCode.NOT_FOUND and self._by_log_line.take("", self._clock()):
            _LOG.warning("no certificate for %s: %s", context.peer(), details)
        await context.abort(code, details)
        raise AssertionError("unreachable: abort raises")


class IdentityServer:
    """The gRPC server of the certificate service."""

    def __init__(self, servicer: IdentityServicer, tls: OperatorTls) -> None:
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        # Kept here as well: connections ask it for certificates as long as the server lives.
        self._credentials = tls.server_credentials()
        pb_grpc.add_IdentityServiceServicer_to_server(servicer, self._server)

    async def start(self, host: str | None, port: int) -> int:
        """Listens, on all addresses unless `host` is given, and returns the port. Raises `IdentityPortError`."""
        host = host or _ALL_ADDRESSES
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise IdentityPortError(f"--identity-port {port}: cannot listen on {address}") from error
        await self._server.start()
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Stops to accept, and cuts what still runs after `grace_seconds`."""
        await self._server.stop(grace_seconds)


def _address(peer: str) -> str:
    """`ipv4:10.0.0.1:5000` without its port, which every connection has another one of."""
    return peer.rpartition(":")[0]
