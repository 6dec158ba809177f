"""Start-up, readiness and liveness probes with Kubernetes' defaults and semantics."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from specserve_operator.cluster.local.podspec import Launch, PodConfigError, explained

_MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ProbeTiming:
    """Times in seconds, thresholds in consecutive results; Kubernetes' defaults."""

    initial_delay_seconds: float = 0.0
    period_seconds: float = 10.0
    timeout_seconds: float = 1.0
    success_threshold: int = 1
    failure_threshold: int = 3

    @classmethod
    def of(cls, probe: Mapping[str, Any]) -> "ProbeTiming":
        return cls(
            initial_delay_seconds=probe.get("initialDelaySeconds", 0),
            period_seconds=probe.get("periodSeconds", 10),
            timeout_seconds=probe.get("timeoutSeconds", 1),
            success_threshold=probe.get("successThreshold", 1),
            failure_threshold=probe.get("failureThreshold", 3),
        )


@dataclass(frozen=True, slots=True)
class ProbeResult:
    ok: bool
    message: str = ""


@dataclass(slots=True)
class Thresholds:
    """Turns single results into a verdict: True or False when a threshold is reached, None while undecided."""

    timing: ProbeTiming
    _last: bool | None = field(default=None, init=False)
    _run: int = field(default=0, init=False)

    def observe(self, ok: bool) -> bool | None:
        self._run = self._run + 1 if ok == self._last else 1
        self._last = ok
        needed = self.timing.success_threshold if ok else self.timing.failure_threshold
        return ok if self._run >= needed else None


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """What actions act upon: the pod's address, its named ports, and how to run a command in the container."""

    pod_ip: str
    resolve_port: Callable[[int | str], int | None]
    resolve_command: Callable[[list[str]], Launch]
    http: aiohttp.ClientSession


async def run_action(action: Mapping[str, Any], target: ProbeTarget, timeout_seconds: float) -> ProbeResult:
    """Carries out a probe or hook once. That it fails is a result, not an error."""
    for kind, run in _ACTIONS.items():
        if kind in action:
            try:
                with explained(kind):
                    async with asyncio.timeout(timeout_seconds):
                        return await run(action[kind], target)
            except TimeoutError:
                return ProbeResult(False, f"no answer within {timeout_seconds:g} s")
            except (OSError, PodConfigError, aiohttp.ClientError) as error:
                return ProbeResult(False, str(error) or type(error).__name__)
    return ProbeResult(False, f"has none of the actions {', '.join(_ACTIONS)}")


async def _http_get(action: Mapping[str, Any], target: ProbeTarget) -> ProbeResult:
    port = _port(action, target)
    host = action.get("host") or target.pod_ip
    scheme = action.get("scheme", "HTTP").lower()
    path = action.get("path", "/")
    url = f"{scheme}://{host}:{port}{path if path.startswith('/') else '/' + path}"
    headers = {"User-Agent": "kube-probe/local"} | {h["name"]: h["value"] for h in action.get("httpHeaders", ())}
    try:
        async with target.http.get(url, headers=headers, allow_redirects=False, ssl=False) as response:
            if 200 <= response.status < 400:
                return ProbeResult(True)
            text = (await response.text(errors="replace"))[:_MESSAGE_CHARACTERS]
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno or 0  # of a failed name look-up it is negative
        return ProbeResult(False, f"GET {url}: {os.strerror(number).lower() if number > 0 else error.os_error}")
    return ProbeResult(False, f"GET {url}: status {response.status} {text}".strip())


async def _tcp_socket(action: Mapping[str, Any], target: ProbeTarget) -> ProbeResult:
    _, writer = await asyncio.open_connection(action.get("host") or target.pod_ip, _port(action, target))
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return ProbeResult(True)


async def _exec(action: Mapping[str, Any], target: ProbeTarget) -> ProbeResult:
    launch = target.resolve_command(list(action["command"]))
    process = await asyncio.create_subprocess_exec(
        *launch.argv,
        env=launch.env,
        cwd=launch.working_dir,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
        raise
    text = output.decode(errors="replace").strip()[:_MESSAGE_CHARACTERS]
    return ProbeResult(process.returncode == 0, text or f"exit code {process.returncode}")


async def _grpc(action: Mapping[str, Any], target: ProbeTarget) -> ProbeResult:
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(f"{target.pod_ip}:{_port(action, target)}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=action.get("service", "")))
        except grpc.aio.AioRpcError as error:
            return ProbeResult(False, f"{error.code().name}: {error.details()}")
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return ProbeResult(serving, "" if serving else f"status {answer.status}")


async def _sleep(action: Mapping[str, Any], _: ProbeTarget) -> ProbeResult:
    await asyncio.sleep(action["seconds"])
    return ProbeResult(True)


_ACTIONS: Mapping[str, Callable[[Mapping[str, Any], ProbeTarget], Awaitable[ProbeResult]]] = {
    "httpGet": _http_get,
    "exec": _exec,
    "tcpSocket": _tcp_socket,
    "grpc": _grpc,
    "sleep": _sleep,
}


def _port(action: Mapping[str, Any], target: ProbeTarget) -> int:
    port = target.resolve_port(action["port"])
    if port is None:
        raise OSError(f"no port is named {action['port']}")
    return port


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """A start-up or liveness probe gave up on the container. `grace_seconds`: the probe's own, if it has one."""

    probe: str
    message: str
    grace_seconds: float | None


@dataclass(frozen=True, slots=True)
class ProbeListener:
    """What a container's life does with verdicts, which repeat while nothing changes."""

    set_started: Callable[[bool], None]
    set_ready: Callable[[bool], None]
    failed: Callable[[str, str], None]  # probe, message: every single failure


async def supervise(container: Mapping[str, Any], target: ProbeTarget, listener: ProbeListener) -> ProbeFailure:
    """Probes a container that has just started, until it has to be restarted. Cancel it when the container ends.

    Until the start-up probe succeeds, the others rest. Without a readiness probe a started container is ready; without
    a liveness probe this never returns.
    """
    if (startup := container.get("startupProbe")) is not None:
        started, message = await anext(_verdicts(startup, "Startup", target, listener))
        if not started:
            return ProbeFailure("Startup", message, startup.get("terminationGracePeriodSeconds"))
    listener.set_started(True)
    readiness = asyncio.ensure_future(_keep_ready(container.get("readinessProbe"), target, listener))
    try:
        return await _until_not_alive(container.get("livenessProbe"), target, listener)
    finally:
        readiness.cancel()
        await asyncio.wait([readiness])


async def _keep_ready(probe: Mapping[str, Any] | None, target: ProbeTarget, listener: ProbeListener) -> None:
    if probe is None:
        listener.set_ready(True)
        return
    async for ready, _ in _verdicts(probe, "Readiness", target, listener):
        listener.set_ready(ready)


async def _until_not_alive(
    probe: Mapping[str, Any] | None, target: ProbeTarget, listener: ProbeListener
) -> ProbeFailure:
    if probe is not None:
        async for alive, message in _verdicts(probe, "Liveness", target, listener):
            if not alive:
                return ProbeFailure("Liveness", message, probe.get("terminationGracePeriodSeconds"))
    forever: asyncio.Future[ProbeFailure] = asyncio.get_running_loop().create_future()
    return await forever  # nothing can fail: the caller cancels


async def _verdicts(
    probe: Mapping[str, Any], name: str, target: ProbeTarget, listener: ProbeListener
) -> AsyncIterator[tuple[bool, str]]:
    """Runs one probe for ever; yields its verdict, with the last message, whenever a threshold is met."""
    timing = ProbeTiming.of(probe)
    thresholds = Thresholds(timing)
    await asyncio.sleep(timing.initial_delay_seconds)
    while True:
        result = await run_action(probe, target, timing.timeout_seconds)
        if not result.ok:
            listener.failed(name, result.message)
        if (verdict := thresholds.observe(result.ok)) is not None:
            yield verdict, result.message
        await asyncio.sleep(timing.period_seconds)
