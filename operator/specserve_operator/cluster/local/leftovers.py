"""Finds and kills processes of containers whose shim or control plane was killed.

A process belongs to a container if it is in the session of the container's main process, which is noted in
`run/<container>.json`, or carries the pod's uid in its environment. Either alone misses some: programs may start
sessions of their own, and programs that set their title overwrite their environment.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve_operator.cluster.local import procfs

POD_UID_VARIABLE = "SPECSERVE_POD_UID"
CONTAINER_VARIABLE = "SPECSERVE_CONTAINER"

_LIMIT_SECONDS = 10.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class PidNote:
    """What a shim noted of its container."""

    pid: int
    start_ticks: int
    shim: int


def pid_note_path(pod_folder: Path, container: str) -> Path:
    return pod_folder / "run" / f"{container}.json"


def read_pid_note(path: Path) -> PidNote | None:
    """The note, or None if there is none (then the container ended in order) or it is of another boot.

    Pids and start times count from the boot, so after the next one they name some other process.
    """
    try:
        raw = json.loads(path.read_text())
        if raw["boot"] != procfs.boot_id():
            return None
        return PidNote(pid=int(raw["pid"]), start_ticks=int(raw["startTicks"]), shim=int(raw["shim"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def kill_container(pod_uid: str, container: str, note: PidNote | None) -> int:
    """Kills all that is left of one container; returns how many processes that were. Blocks until they are gone."""

    def belongs(process: procfs.ProcessStat) -> bool:
        if note is not None and _in_session(process, note):
            return True
        env = procfs.read_environment(process.pid)
        return env.get(POD_UID_VARIABLE) == pod_uid and env.get(CONTAINER_VARIABLE) == container

    return _kill_until_none(belongs)


def kill_pods(pod_uids: Iterable[str], notes: Iterable[PidNote]) -> int:
    """Kills all that is left of the pods of an earlier control plane. Blocks until they are gone."""
    uids, known = frozenset(pod_uids), tuple(notes)

    def belongs(process: procfs.ProcessStat) -> bool:
        if any(_in_session(process, note) for note in known):
            return True
        return procfs.read_environment(process.pid).get(POD_UID_VARIABLE) in uids

    return _kill_until_none(belongs) if uids or known else 0


def _in_session(process: procfs.ProcessStat, note: PidNote) -> bool:
    """True if `process` is the noted one, or of its session. The kernel gives no pid out that still names a session."""
    if process.session != note.pid or process.start_ticks < note.start_ticks:
        return False
    leader = procfs.read_stat(note.pid)
    return leader is None or leader.start_ticks == note.start_ticks


def _kill_until_none(belongs: Callable[[procfs.ProcessStat], bool]) -> int:
    killed: set[int] = set()
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        found = list(_living(belongs))
        if not found:
            break
        for pid in found:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(_POLL_SECONDS)
    return len(killed)


def _living(belongs: Callable[[procfs.ProcessStat], bool]) -> Iterator[int]:
    for process in procfs.list_processes():
        if process.is_alive and process.pid != os.getpid() and belongs(process):
            yield process.pid
