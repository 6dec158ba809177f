"""How many processor cores this process has for itself. Linux."""

import os
from pathlib import Path
from typing import Final

_CPU_FOLDER: Final = Path("/sys/devices/system/cpu")
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")


def count_cores(*, cpu_folder: Path = _CPU_FOLDER, cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Physical cores among the processors that this process may run on, within its container's limit; at least 1.

    Two threads of one core share its arithmetic units, so matrix products gain nothing from the second.
    """
    cores = {_siblings(cpu_folder, cpu) for cpu in os.sched_getaffinity(0)}
    limit = _read_limit(cgroup_limit)
    return max(1, len(cores) if limit is None else min(len(cores), int(limit)))


def _siblings(cpu_folder: Path, cpu: int) -> str:
    """A name of the core of processor `cpu`: the list of its threads."""
    try:
        return (cpu_folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _read_limit(path: Path) -> float | None:
    """Processors that a version 2 cgroup grants, from `cpu.max` ("<quota or max> <period>", microseconds)."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
