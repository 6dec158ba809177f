"""gRPC `ControlService` of a serving pod, with the standard health service (`Check` only) beside it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specserve_protos.v1alpha1 import control_pb2, control_pb2_grpc
from specserve_workers.control.drain import DrainState
from specserve_workers.control.engine import EngineNumbers, EngineUnavailableError
from specserve_workers.control.runtime_state import RuntimeState, SpeculationControl
from specserve_workers.control.stats import LatencyHistogram, RequestOutcome, ServingStats
from specserve_workers.identity.channels import SERVER_OPTIONS, AsyncPeerGuard, ServerTls, server_credentials
from specserve_workers.speculation.settings import BatchCap, PolicyName, SettingsError, SpeculationSettings

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME: Final = "specserve_protos.v1alpha1.ControlService"
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_DRAIN_SECONDS: Final = 3600
_OPTIONS: Final = (
    # Without this, a second server on the same port would silently take half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

_POLICIES: Final = {
    PolicyName.OFF: control_pb2.LENGTH_POLICY_OFF,
    PolicyName.STATIC: control_pb2.LENGTH_POLICY_STATIC,
    PolicyName.DSDE: control_pb2.LENGTH_POLICY_DSDE,
}
_CAPS: Final = {BatchCap.NONE: control_pb2.BATCH_CAP_NONE, BatchCap.MEAN: control_pb2.BATCH_CAP_MEAN}


class ControlPortError(OSError):
    """The control port cannot be listened on."""


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """Who answers: `pool` is "prefill" or "decode"."""

    name: str
    uid: str
    pool: str
    revision: str


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Answers from memory; only `SetSpeculation` and `Drain` wait for anything."""

    def __init__(
        self,
        identity: PodIdentity,
        *,
        stats: ServingStats,
        numbers: EngineNumbers,
        speculation: SpeculationControl,
        drain: DrainState,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._stats = stats
        self._numbers = numbers
        self._speculation = speculation
        self._drain = drain
        self._clock = clock
        self._started_at = clock()

    async def GetStats(  # noqa: N802 - the name of the method in the protocol
        self, request: control_pb2.GetStatsRequest, context: "Context"
    ) -> control_pb2.GetStatsResponse:
        return control_pb2.GetStatsResponse(
            pod_name=self._identity.name,
            pod_uid=self._identity.uid,
            pool=self._identity.pool,
            revision=self._identity.revision,
            uptime_seconds=self._clock() - self._started_at,
            draining=self._drain.draining,
            requests=request_stats(self._stats),
            speculation=speculation_stats(self._numbers.speculation, self._speculation),
            kv_transfer=kv_transfer_stats(self._numbers.kv_transfer, self._stats),
        )

    async def SetSpeculation(  # noqa: N802
        self, request: control_pb2.SetSpeculationRequest, context: "Context"
    ) -> control_pb2.SetSpeculationResponse:
        try:
            state = RuntimeState(request.generation, settings_from_proto(request.settings))
            applied = await self._speculation.offer(state)
        except SettingsError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except EngineUnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        in_force = self._speculation.state
        return control_pb2.SetSpeculationResponse(
            in_force=settings_to_proto(in_force.speculation), generation=in_force.generation, applied=applied
        )

    async def Drain(  # noqa: N802
        self, request: control_pb2.DrainRequest, context: "Context"
    ) -> control_pb2.DrainResponse:
        drained = await self._drain.wait(min(request.timeout_seconds, MAX_DRAIN_SECONDS))
        return control_pb2.DrainResponse(drained=drained, running=self._drain.running)


class _HealthServicer(health.aio.HealthServicer):
    """Only `Check`, which is short: a `Watch` takes one of the RPCs for as long as its client likes."""

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: "Context"
    ) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "only Check is served")


class ControlServer:
    """The gRPC server of the control port, in the event loop of the HTTP server."""

    def __init__(self, service: ControlService, *, tls: ServerTls | None = None) -> None:
        """`tls`: certificates, and who may call; None serves everybody, in plaintext."""
        self._server = grpc.aio.server(
            options=_OPTIONS if tls is None else (*_OPTIONS, *SERVER_OPTIONS),
            interceptors=() if tls is None else (AsyncPeerGuard(tls.rule),),
            maximum_concurrent_rpcs=64,
        )
        self._health = _HealthServicer()
        # New connections ask it for their certificates for as long as there is a server.
        self._credentials = None if tls is None else server_credentials(tls.source)
        control_pb2_grpc.add_ControlServiceServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the port. Raises ControlPortError where the address is taken or not this pod's."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ControlPortError(f"--control-port {port}: cannot listen on {address}") from error
        await self._server.start()
        for name in ("", SERVICE_NAME):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return bound

    async def stop(self, grace_seconds: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)


def settings_from_proto(settings: control_pb2.SpeculationSettings) -> SpeculationSettings:
    """Raises SettingsError for an unspecified or unknown policy or cap, and for lengths out of range."""
    policy = next((name for name, value in _POLICIES.items() if value == settings.policy), None)
    if policy is None:
        raise SettingsError(f"settings.policy {settings.policy} is not known here")
    cap = next((name for name, value in _CAPS.items() if value == settings.cap), None)
    if cap is None:
        raise SettingsError(f"settings.cap {settings.cap} is not known here")
    return SpeculationSettings(
        policy=policy,
        cap=cap,
        min_tokens=settings.min_tokens,
        max_tokens=settings.max_tokens,
        static_tokens=settings.static_tokens,
    )


def settings_to_proto(settings: SpeculationSettings) -> control_pb2.SpeculationSettings:
    return control_pb2.SpeculationSettings(
        policy=_POLICIES[settings.policy],
        cap=_CAPS[settings.cap],
        min_tokens=settings.min_tokens,
        max_tokens=settings.max_tokens,
        static_tokens=settings.static_tokens,
    )


def request_stats(stats: ServingStats) -> control_pb2.RequestStats:
    return control_pb2.RequestStats(
        started=stats.started,
        succeeded=stats.outcomes[RequestOutcome.SUCCEEDED],
        failed=stats.outcomes[RequestOutcome.FAILED],
        refused=stats.outcomes[RequestOutcome.REFUSED],
        cancelled=stats.outcomes[RequestOutcome.CANCELLED],
        running=stats.running,
        time_to_first_token=_histogram(stats.time_to_first_token),
        time_per_output_token=_histogram(stats.time_per_output_token),
        prompt_tokens=stats.prompt_tokens,
        output_tokens=stats.output_tokens,
    )


def speculation_stats(engine: Mapping[str, Any], control: SpeculationControl) -> control_pb2.SpeculationStats:
    """The engine's counters with the settings in force; those the pod knows itself."""
    counters = {key: engine[key] for key in _SPECULATION_COUNTERS if key in engine}
    return control_pb2.SpeculationStats(
        in_force=settings_to_proto(control.state.speculation),
        generation=control.state.generation,
        started_max_tokens=control.started_max_tokens,
        by_policy=[_policy_stats(entry) for entry in engine.get("by_policy", ())],
        **counters,
    )


_SPECULATION_COUNTERS: Final = ("refilled_sequences", "refilled_tokens", "draft_forwards", "steps_without_draft")
_POLICY_COUNTERS: Final = (
    "verified_sequences",
    "drafted_tokens",
    "accepted_tokens",
    "drafted_by_position",
    "accepted_by_position",
    "kld_sum_nats",
    "kld_positions",
)
_KV_COUNTERS: Final = (
    "remote_prefills",
    "loaded_tokens",
    "loaded_bytes",
    "served_transfers",
    "served_bytes",
    "open_leases",
    "expired_leases",
)


def _policy_stats(entry: Mapping[str, Any]) -> control_pb2.PolicyStats:
    counters = {key: entry[key] for key in _POLICY_COUNTERS if key in entry}
    return control_pb2.PolicyStats(policy=_POLICIES[PolicyName(entry["policy"])], **counters)


def kv_transfer_stats(engine: Mapping[str, Any], stats: ServingStats) -> control_pb2.KvTransferStats:
    """The connector's counters, with the fallbacks of the front end added to its own."""
    fallbacks = all_fallbacks(engine, stats)
    counters = {key: engine[key] for key in _KV_COUNTERS if key in engine}
    return control_pb2.KvTransferStats(
        fallbacks=[control_pb2.Fallback(cause=cause, count=count) for cause, count in sorted(fallbacks.items())],
        **counters,
    )


def all_fallbacks(engine: Mapping[str, Any], stats: ServingStats) -> dict[str, int]:
    """Local prefills by cause, of both halves of the pod."""
    fallbacks = {str(cause): count for cause, count in stats.fallbacks.items()}
    for cause, count in engine.get("fallbacks", {}).items():
        fallbacks[cause] = fallbacks.get(cause, 0) + count
    return fallbacks


def _histogram(histogram: LatencyHistogram) -> control_pb2.Histogram:
    return control_pb2.Histogram(upper_bounds_ms=histogram.bounds_ms, counts=histogram.counts, sum_ms=histogram.sum_ms)
