"""Facts about processes from /proc: who is alive, in which session, with which environment."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of /proc/<pid>/stat. `start_ticks` (since boot) tells a process from a later one with the same pid."""

    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """False for a zombie, which only waits for its parent."""
        return self.state not in ("Z", "X")


def read_stat(pid: int) -> ProcessStat | None:
    """The process `pid`, or None if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command, in parentheses, may itself hold blanks and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(
        pid=pid, state=fields[0], parent=int(fields[1]), session=int(fields[3]), start_ticks=int(fields[19])
    )


def boot_id() -> str:
    """Names the present boot of this machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def is_running(pid: int, start_ticks: int) -> bool:
    """True if `pid` is still the process that started at `start_ticks`."""
    stat = read_stat(pid)
    return stat is not None and stat.is_alive and stat.start_ticks == start_ticks


def list_processes() -> Iterator[ProcessStat]:
    """All processes there are, zombies included, in no order."""
    for entry in os.listdir(_PROC):
        if entry.isdigit() and (stat := read_stat(int(entry))) is not None:
            yield stat


def read_environment(pid: int) -> Mapping[str, str]:
    """The environment `pid` was started with; empty if it is gone, not ours, or has overwritten it."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot; 0 where it does not count."""
    try:
        text = (_PROC / "vmstat").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0
