"""The life of one container: start, probe, end, wait, start again, until its pod ends."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specserve_operator.cluster.local import leftovers, logs, ports, probes, procfs
from specserve_operator.cluster.local.options import LocalOptions
from specserve_operator.cluster.local.podspec import Launch, PodConfigError, explained
from specserve_operator.cluster.local.podstatus import (
    ContainerRecord,
    Running,
    Terminated,
    Waiting,
    termination_reason,
)
from specserve_operator.cluster.local.process import ContainerProcess, Exit, RunPaths, StartFailedError
from specserve_operator.cluster.local.store import timestamp

# After a preStop hook a container is given at least this long, even if the grace period is over (as the kubelet does).
_MIN_GRACE_SECONDS = 2.0
_LOG_CHECK_SECONDS = 10.0


@dataclass(slots=True)
class RestartBackoff:
    """How long to wait before the next start: nothing, then the base, doubled each time; forgotten after a long run."""

    base_seconds: float
    max_seconds: float
    reset_seconds: float
    _next_seconds: float = field(default=0.0, init=False)

    def after_run(self, run_seconds: float) -> float:
        """The wait after a run of this length."""
        if run_seconds >= self.reset_seconds:
            self._next_seconds = 0.0
        wait = self._next_seconds
        self._next_seconds = min(self.max_seconds, max(self.base_seconds, wait * 2))
        return wait


class Termination:
    """Says that a pod ends. Asked once; `hasten` ends the patience at once."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hastened = asyncio.Event()
        self.grace_seconds = 0.0

    def request(self, grace_seconds: float) -> None:
        if not self.requested.is_set():
            self.grace_seconds = grace_seconds
            self.requested.set()

    def hasten(self) -> None:
        self.request(0.0)
        self.hastened.set()


class ContainerContext(Protocol):
    """What the pod offers its containers."""

    pod_uid: str
    pod_ip: str
    folder: Path
    grace_seconds: float
    options: LocalOptions
    termination: Termination

    def plan_launch(self, container: Mapping[str, Any]) -> Launch:
        """What to run. Raises `PodConfigError`."""
        ...

    def probe_target(self, container: Mapping[str, Any]) -> probes.ProbeTarget: ...
    def publish(self) -> None:
        """A record has changed."""
        ...

    def event(self, *, warning: bool, reason: str, message: str) -> None: ...


class ContainerRunner:
    """Runs one container of a pod; `record` is what is known of it at any time."""

    def __init__(
        self, container: Mapping[str, Any], context: ContainerContext, *, restart_policy: str, is_init: bool
    ) -> None:
        self._spec = container
        self._pod = context
        self._restart_policy = restart_policy
        self._is_init = is_init
        options = context.options
        self._backoff = RestartBackoff(
            options.restart_backoff_seconds,
            options.restart_backoff_max_seconds,
            options.restart_backoff_reset_seconds,
        )
        self.name: str = container["name"]
        self.record = ContainerRecord(self.name, container.get("image", ""))

    def wait_for_pod(self, waiting: Waiting) -> None:
        """Notes what the pod waits for before this container can run. Does not publish it."""
        self.record.state = waiting

    async def run(self) -> bool:
        """Runs until the pod ends or the restart policy says that it is enough. True if the last run succeeded."""
        loop = asyncio.get_running_loop()
        while not self._pod.termination.requested.is_set():
            began = loop.time()
            ended = await self._run_once()
            if ended is not None:
                self._set(state=ended, last=self.record.last)
                if not self._restarts_after(ended):
                    return ended.exit_code == 0
            if self._pod.termination.requested.is_set():
                break
            await self._back_off(self._backoff.after_run(loop.time() - began), ended)
        return False

    def _restarts_after(self, ended: Terminated) -> bool:
        if self._is_init or self._restart_policy == "OnFailure":
            return ended.exit_code != 0 and self._restart_policy != "Never"
        return self._restart_policy == "Always"

    async def _back_off(self, wait_seconds: float, ended: Terminated | None) -> None:
        """Waits before the next start. A run that never began (`ended` is None) keeps its own reason meanwhile."""
        if ended is not None:
            if wait_seconds > 0:
                text = f"back-off {wait_seconds:g}s restarting failed container={self.name}"
                self._pod.event(warning=True, reason="BackOff", message=text)
                self._set(state=Waiting("CrashLoopBackOff", text), last=ended)
            else:
                self._set(state=Waiting("ContainerCreating"), last=ended)
        else:
            wait_seconds = max(wait_seconds, self._pod.options.restart_backoff_seconds)
        try:
            await asyncio.wait_for(self._pod.termination.requested.wait(), wait_seconds)
        except TimeoutError:
            if ended is not None:
                self.record.restart_count += 1

    async def _run_once(self) -> Terminated | None:
        """One run. None if it never began: `record` says why."""
        try:
            launch = self._pod.plan_launch(self._spec)
            self._check_ports()
            process = await self._start(launch)
        except PodConfigError as error:
            self._fail_to_start(error.reason, str(error))
            return None
        except StartFailedError as error:
            self._fail_to_start("RunContainerError", str(error))
            return None
        started_at, oom_kills = timestamp(), procfs.count_oom_kills()
        self._set(state=Running(started_at), last=self.record.last)
        self._pod.event(warning=False, reason="Started", message=f"Started container {self.name}")
        ended = await self._accompany(process)
        return self._describe_end(ended, started_at, oom_killed=procfs.count_oom_kills() > oom_kills)

    def _check_ports(self) -> None:
        """A port that somebody else has, on all addresses, would only show as a crash somewhere in the log."""
        for port in self._spec.get("ports", ()):
            with explained(f"ports of container {self.name}"):
                number = int(port["containerPort"])
            if port.get("protocol", "TCP") == "TCP" and (why := ports.find_conflict(self._pod.pod_ip, number)):
                raise PodConfigError(f"container port {port.get('name', number)}: {why}")

    async def _start(self, launch: Launch) -> ContainerProcess:
        return await ContainerProcess.start(
            launch,
            pod_uid=self._pod.pod_uid,
            container=self.name,
            paths=RunPaths(
                log=logs.start_new(self._pod.folder, self.name),
                pid_note=leftovers.pid_note_path(self._pod.folder, self.name),
            ),
            orphan_grace_seconds=self._pod.options.orphan_grace_seconds,
            linger_seconds=self._pod.options.linger_seconds,
        )

    def _fail_to_start(self, reason: str, message: str) -> None:
        if self.record.state != Waiting(reason, message):
            self._pod.event(warning=True, reason="Failed", message=f"Error: {message}")
        self._set(state=Waiting(reason, message), last=self.record.last)

    async def _accompany(self, process: ContainerProcess) -> Exit:
        """From the start of the program to its end: probes it, and ends it if they or the pod say so."""
        exited = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(self._pod.termination.requested.wait())
        log_keeper = asyncio.ensure_future(self._keep_log_small())
        probing = asyncio.ensure_future(self._probe())
        tasks: set[asyncio.Future[Any]] = {exited, stopped, log_keeper, probing}
        try:
            await asyncio.wait(tasks - {log_keeper}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                grace_seconds = self._pod.termination.grace_seconds
                if not stopped.done():
                    grace_seconds = self._grace_after(probing.result())
                await self._end(process, exited, grace_seconds)
            return await exited
        finally:
            if not exited.done():  # cancelled, or a fault of ours: the container must not run on unwatched
                process.kill()
            for task in tasks - {exited}:
                task.cancel()
            await asyncio.wait(tasks)

    def _grace_after(self, failure: probes.ProbeFailure) -> float:
        text = f"Container {self.name} failed {failure.probe.lower()} probe, will be restarted"
        self._pod.event(warning=False, reason="Killing", message=text)
        own = failure.grace_seconds
        return self._pod.grace_seconds if own is None else own

    async def _end(self, process: ContainerProcess, exited: asyncio.Future[Exit], grace_seconds: float) -> None:
        """preStop, SIGTERM, grace, SIGKILL. The grace period covers the hook."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_seconds
        hastened = asyncio.ensure_future(self._pod.termination.hastened.wait())
        enough: set[asyncio.Future[Any]] = {exited, hastened}
        try:
            hook = self._spec.get("lifecycle", {}).get("preStop")
            if hook is not None:
                task = asyncio.ensure_future(self._run_hook(hook, grace_seconds))
                await asyncio.wait({task, *enough}, return_when=asyncio.FIRST_COMPLETED)
                task.cancel()
                await asyncio.wait({task})
                deadline = max(deadline, loop.time() + _MIN_GRACE_SECONDS)
            process.terminate()
            await asyncio.wait(enough, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                process.kill()
                await asyncio.wait({exited})
        finally:
            hastened.cancel()
            await asyncio.wait({hastened})

    async def _run_hook(self, hook: Mapping[str, Any], timeout_seconds: float) -> None:
        result = await probes.run_action(hook, self._pod.probe_target(self._spec), timeout_seconds)
        if not result.ok:
            text = f"PreStop hook of container {self.name} failed: {result.message}"
            self._pod.event(warning=True, reason="FailedPreStopHook", message=text)

    async def _probe(self) -> probes.ProbeFailure:
        listener = probes.ProbeListener(self._set_started, self._set_ready, self._note_probe_failure)
        return await probes.supervise(self._spec, self._pod.probe_target(self._spec), listener)

    def _set_started(self, started: bool) -> None:
        self.record.started = started
        self._pod.publish()

    def _set_ready(self, ready: bool) -> None:
        if self.record.ready != ready:
            self.record.ready = ready
            self._pod.publish()

    def _note_probe_failure(self, probe: str, message: str) -> None:
        # While a pod ends, and before a container has been ready, a probe that fails is no news.
        if not self._pod.termination.requested.is_set() and (probe != "Readiness" or self.record.ready):
            self._pod.event(warning=True, reason="Unhealthy", message=f"{probe} probe failed: {message}")

    async def _keep_log_small(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_SECONDS)
            limit = self._pod.options.log_limit_bytes
            await asyncio.to_thread(logs.limit_size, self._pod.folder, self.name, limit)

    def _describe_end(self, ended: Exit, started_at: str, *, oom_killed: bool) -> Terminated:
        oom = oom_killed and ended.signal == 9 and not ended.killed
        message = ended.note
        if ended.code != 0 and self._spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            tail = logs.termination_message(logs.path_of(self._pod.folder, self.name))
            message = "\n".join(part for part in (ended.note, tail) if part)
        return Terminated(
            exit_code=ended.code,
            reason=termination_reason(ended.code, oom_killed=oom),
            message=message,
            started_at=started_at,
            finished_at=timestamp(),
            signal=ended.signal,
        )

    def _set(self, *, state: Waiting | Running | Terminated, last: Terminated | None) -> None:
        self.record.state = state
        self.record.last = last
        if not isinstance(state, Running):
            self.record.ready = self.record.started = False
        if self._is_init and isinstance(state, Terminated):
            self.record.ready = state.exit_code == 0
        self._pod.publish()
