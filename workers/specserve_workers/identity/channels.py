"""TLS of gRPC: servers that ask for certificates and judge them, channels that know whom they want to reach."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import grpc

from specserve_workers.identity.material import Material, MaterialSource, NoIdentityError, throwaway_material
from specserve_workers.identity.names import OPERATOR_ID, ServiceId

logger = logging.getLogger(__name__)

# A connection this old is given up once its calls have ended: the next shows certificates of its time.
MAX_CONNECTION_AGE_MS: Final = 3_600_000
SERVER_OPTIONS: Final = (("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),)

_PEER_ID: Final = "peer_spiffe_id"


def server_credentials(source: MaterialSource) -> grpc.ServerCredentials:
    """Of a server that lets in who has a certificate of a trusted authority.

    Every new connection gets the material of its time. Before there is any, nobody gets in. The result must be kept as
    long as the server.
    """
    shown = _current(source) or throwaway_material()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        material = _current(source)
        if material is None or material == shown:
            return None
        shown = material
        return _configuration(material)

    # None is how to say that nothing has changed, which the library's types leave out.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        fetch,  # type: ignore[arg-type]
        require_client_authentication=True,
    )


def _current(source: MaterialSource) -> Material | None:
    try:
        return source.current()
    except NoIdentityError:
        return None


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key_pem, material.certificate_pem)], root_certificates=material.trust_pem
    )


@dataclass(frozen=True, slots=True)
class ChannelTls:
    """What a channel is opened with, for good: under another `version` another one is due."""

    credentials: grpc.ChannelCredentials
    server_name: str
    version: int

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Options of the channel: the address is no name, so the name to check is said here."""
        return (("grpc.ssl_target_name_override", self.server_name),)


class PeerTls:
    """TLS of channels to the pods of one pool of this service. Thread-safe."""

    def __init__(self, source: MaterialSource, service: ServiceId, *, pool: str) -> None:
        self._source = source
        self._server_name = service.host(pool)
        self._made: ChannelTls | None = None

    def current(self) -> ChannelTls:
        """For a channel that is used now. Raises `NoIdentityError`."""
        material = self._source.current()
        made = self._made
        if made is None or made.version != material.version:
            credentials = grpc.ssl_channel_credentials(
                root_certificates=material.trust_pem,
                private_key=material.key_pem,
                certificate_chain=material.certificate_pem,
            )
            made = self._made = ChannelTls(credentials, self._server_name, material.version)
        return made


@dataclass(frozen=True, slots=True)
class PeerRule:
    """Who may call a server. `wanted` says it in words."""

    is_allowed: Callable[[str], bool]
    wanted: str

    def refusal_of(self, uri: str) -> str | None:
        """Why the peer with this SPIFFE id may not; None if it may. "" for one that has none."""
        if self.is_allowed(uri):
            return None
        return f"only {self.wanted} may call this, and the caller is {uri or 'nobody'}"

    def refusal(self, context: Any) -> str | None:
        """The same for the caller of an RPC."""
        found = context.auth_context().get(_PEER_ID, ())
        return self.refusal_of(found[0].decode(errors="replace") if found else "")


def pool_rule(service: ServiceId, *, pool: str) -> PeerRule:
    """The pods of one pool of this service."""
    return PeerRule(
        lambda uri: service.has_pod(uri, pool=pool), f"{pool} pods of {service.namespace}/{service.service}"
    )


def operator_rule() -> PeerRule:
    """The operator alone."""
    return PeerRule(lambda uri: uri == OPERATOR_ID, "the operator")


Behaviour = Callable[[Any, Any], Any]
if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server needs: its certificates, and who may call."""

    source: MaterialSource
    rule: PeerRule


class PeerGuard(grpc.ServerInterceptor):
    """Lets only the peers of a rule call, whatever method. For servers with threads."""

    def __init__(self, rule: PeerRule) -> None:
        self._rule = rule

    def intercept_service(
        self, continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]", handler_call_details: Any
    ) -> "Handler | None":
        return _wrap(continuation(handler_call_details), self._guard)

    def _guard(self, behaviour: Behaviour) -> Behaviour:
        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            refusal = self._rule.refusal(context)
            if refusal is not None:
                _abort(context, refusal)
            return behaviour(request, context)

        return guarded


class AsyncPeerGuard(grpc.aio.ServerInterceptor):
    """As `PeerGuard`, for servers of an event loop whose methods are coroutines."""

    def __init__(self, rule: PeerRule) -> None:
        self._rule = rule

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        return _wrap(await continuation(handler_call_details), self._guard)

    def _guard(self, behaviour: Behaviour) -> Behaviour:
        if not inspect.iscoroutinefunction(behaviour):
            raise TypeError(f"{behaviour!r} is no coroutine function, and would be called without a check")

        async def guarded(request: Any, context: Any) -> Any:
            refusal = self._rule.refusal(context)
            if refusal is not None:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
            return await behaviour(request, context)

        return guarded


def _wrap(handler: "Handler | None", guard: Callable[[Behaviour], Behaviour]) -> "Handler | None":
    """The handler with its behaviour guarded; None, for a method that there is not, stays so."""
    if handler is None:
        return None
    if handler.request_streaming:
        raise TypeError("methods that take a stream are not guarded, and so not served")
    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(
        guard(cast(Behaviour, behaviour)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _abort(context: grpc.ServicerContext, details: str) -> NoReturn:
    context.abort(grpc.StatusCode.PERMISSION_DENIED, details)
    raise AssertionError("unreachable: abort raises")
