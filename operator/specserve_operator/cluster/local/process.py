"""One run of a container as seen from the control plane: starts the shim, listens to it, gives it orders."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from specserve_operator.cluster.local import leftovers, shim
from specserve_operator.cluster.local.podspec import Launch

_SHIM = Path(shim.__file__)
_KILLED_CODE = 137  # 128 + SIGKILL


class StartFailedError(Exception):
    """The program could not be executed; the message says why."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a run ended. `killed`: by our own order. `note`: what is to be said besides the container's own log."""

    code: int
    signal: int
    killed: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Files of one run. The log is appended to."""

    log: Path
    pid_note: Path


class ContainerProcess:
    """A running container. `wait` may be called by several tasks."""

    def __init__(self, shim_process: Process, pid: int, *, identity: tuple[str, str], paths: RunPaths) -> None:
        self.pid = pid
        self._shim = shim_process
        self._identity = identity
        self._paths = paths
        self._exit = asyncio.ensure_future(self._read_exit())

    @classmethod
    async def start(
        cls,
        launch: Launch,
        *,
        pod_uid: str,
        container: str,
        paths: RunPaths,
        orphan_grace_seconds: float,
        linger_seconds: float,
    ) -> Self:
        """Returns once the program is executed. Raises `StartFailedError`."""
        markers = {leftovers.POD_UID_VARIABLE: pod_uid, leftovers.CONTAINER_VARIABLE: container}
        config = {
            "argv": launch.argv,
            "env": {**launch.env, **markers},
            "cwd": str(launch.working_dir),
            "log": str(paths.log),
            "pid_file": str(paths.pid_note),
            "orphan_grace_seconds": orphan_grace_seconds,
            "linger_seconds": linger_seconds,
        }
        paths.pid_note.parent.mkdir(parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_SHIM)),
            stdin=PIPE,
            stdout=PIPE,
            env=markers,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(config).encode() + b"\n")
        report = await _read_report(process)
        if "started" in report:
            return cls(process, int(report["started"]), identity=(pod_uid, container), paths=paths)
        await _close(process)
        raise StartFailedError(report.get("failed", "the process that supervises the container was killed"))

    async def _read_exit(self) -> Exit:
        report = await _read_report(self._shim)
        await _close(self._shim)
        if "exited" in report:
            return Exit(code=report["exited"], signal=report["signal"], killed=report["killed"])
        note = leftovers.read_pid_note(self._paths.pid_note)
        await asyncio.to_thread(leftovers.kill_container, *self._identity, note)
        self._paths.pid_note.unlink(missing_ok=True)
        return Exit(_KILLED_CODE, 9, killed=False, note="the process that supervises the container was killed")

    async def wait(self) -> Exit:
        """Waits until nothing of the container is left."""
        return await asyncio.shield(self._exit)

    def terminate(self) -> None:
        """SIGTERM to the main process."""
        self._order(b"TERM\n")

    def kill(self) -> None:
        """SIGKILL to everything."""
        self._order(b"KILL\n")

    def _order(self, order: bytes) -> None:
        stdin = self._shim.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(order)


async def _read_report(process: Process) -> dict[str, Any]:
    """The next report; empty if the shim ended without one."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    report: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
    return report


async def _close(process: Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
        with suppress(ConnectionError):
            await process.stdin.wait_closed()
    await process.wait()
