"""How many processor cores this process has for itself. Linux."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# CPUs, where nothing else tells: pods that are processes of one machine have no cgroup of their own.
LIMIT_VARIABLE: Final = "SPECSERVE_CPU_LIMIT"
_CPU_FOLDER: Final = Path("/sys/devices/system/cpu")
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")


def cpu_limit(*, environ: Mapping[str, str] = os.environ, cgroup_limit: Path = _CGROUP_LIMIT) -> float | None:
    """CPUs that the container may use; None where it has no limit."""
    try:
        return float(environ[LIMIT_VARIABLE])
    except (KeyError, ValueError):
        return _read_cgroup(cgroup_limit)


def count_cores(limit: float | None = None, *, cpu_folder: Path = _CPU_FOLDER) -> int:
    """Physical cores among the processors that this process may run on, at most `limit`; at least 1.

    Two threads of one core share its arithmetic units, so matrix products gain nothing from the second.
    """
    cores = {_siblings(cpu_folder, cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, len(cores) if limit is None else min(len(cores), int(limit)))


def _siblings(cpu_folder: Path, cpu: int) -> str:
    """A name of the core of processor `cpu`: the list of its threads."""
    try:
        return (cpu_folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _read_cgroup(path: Path) -> float | None:
    """Processors that a version 2 cgroup grants, from `cpu.max` ("<quota or max> <period>", microseconds)."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
