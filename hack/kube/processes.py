"""The processes of a cluster, which outlive the command that starts them.

Nothing is recorded in files that could be stale: a process belongs to the cluster if it is in the cluster's network
namespace, and a variable in its environment names it.
"""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from hack.kube.commands import environment, installed
from hack.kube.errors import ClusterDownError, ComponentFailedError
from hack.kube.network import Network
from hack.kube.waiting import wait_until

NAME_VARIABLE = "SPECSERVE_KUBE_COMPONENT"
END_TIMEOUT_SECONDS = 30.0


class Processes:
    """The named processes in a network namespace. Logs are appended to `logs`/NAME.log."""

    def __init__(self, network: Network, logs: Path) -> None:
        self._network = network
        self._logs = logs

    def start(self, name: str, command: list[str], **variables: str) -> None:
        """Starts `command` as `name`, unless it runs already. It is no child of this process and stays.

        `variables` are added to its environment.
        """
        if not self._network.exists():
            raise ClusterDownError
        if name in self.running():
            return
        detached = self._network.enter(installed("setsid"), "--fork", *command)
        with (self._logs / f"{name}.log").open("ab") as log:
            subprocess.run(
                detached,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(**{NAME_VARIABLE: name}, **variables),
            )

    def running(self) -> dict[str, int]:
        """The process id of each running component: of the outermost process where a component has several."""
        names = {pid: name for pid in self._network.process_ids() if (name := _component(pid))}
        return {name: pid for pid, name in sorted(names.items(), reverse=True) if names.get(_parent(pid)) != name}

    def require(self, *names: str) -> None:
        """Raises ComponentFailedError for the first of `names` that does not run."""
        running = self.running()
        for name in names:
            if name not in running:
                raise ComponentFailedError(name, self._logs / f"{name}.log")

    def kill(self, name: str) -> None:
        """Kills a component with all it started, and waits until it is gone. Nothing happens if it does not run."""
        self._kill_until_gone(lambda: [pid for pid in self._network.process_ids() if _component(pid) == name], name)

    def kill_all(self) -> None:
        """Kills everything in the network namespace, pods included, and waits until it is gone."""
        self._kill_until_gone(self._network.process_ids, "the cluster")

    def _kill_until_gone(self, find: Callable[[], list[int]], what: str) -> None:
        def is_gone() -> bool:
            pids = find()
            for pid in pids:
                _kill(pid)
            return not pids

        wait_until(is_gone, END_TIMEOUT_SECONDS, what=f"all processes of {what} have ended")


def proportional_memory_bytes(pid: int) -> int:
    """The memory of a process and its descendants; what several share is counted by parts (PSS)."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


def _kill(pid: int) -> None:
    """Kills a process, but leaves `unshare` to end by itself.

    It waits for the first process of a node. When it has ended, the kernel has ended every process of the node,
    those of pods too, which are not in the cluster's network namespace and so would not be seen.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.name() != "unshare":
            process.kill()


def _component(pid: int) -> str:
    try:
        return psutil.Process(pid).environ().get(NAME_VARIABLE, "")
    except psutil.Error:
        return ""


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0
