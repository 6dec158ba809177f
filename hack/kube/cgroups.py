"""The control groups under which the nodes of a cluster put their pods."""

import contextlib
import os
from pathlib import Path

NAME = "specserve-kube"


def create(node: str) -> None:
    """Makes a node's group in every hierarchy. Each kubelet needs its own: it removes pods' groups it does not know."""
    for root in _hierarchies():
        group = root / NAME / node
        group.mkdir(parents=True, exist_ok=True)
        for part in (group.parent, group):
            for file in ("cpuset.cpus", "cpuset.mems"):
                # A new cpuset of version 1 is empty, and then takes no process.
                if (root / file).exists():
                    (part / file).write_text((root / file).read_text())


def kubelet_root(node: str) -> str:
    return f"/{NAME}/{node}"


def refusal() -> str:
    """Why no groups can be made here; empty if they can."""
    if not _hierarchies():
        return "no control groups are mounted"
    for root in _hierarchies():
        probe = root / f"{NAME}-probe-{os.getpid()}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            return f"control groups cannot be made below {root}: {error.strerror}"
    return ""


def remove(node: str = "") -> bool:
    """Removes a node's groups, or those of all nodes; false if one has processes still."""
    return all([_remove_tree(root / NAME / node) for root in _hierarchies()])


def _hierarchies() -> list[Path]:
    """Where the hierarchies of version 1 and 2 are mounted."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] in {"cgroup", "cgroup2"}]


def _remove_tree(group: Path) -> bool:
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return not group.exists()
