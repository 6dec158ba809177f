"""Nothing of a container outlives its control plane, its shim or its pod, however these end."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from specserve_operator.cluster.local import LocalCluster, procfs
from tests.component.local_cluster_support import (
    OPTIONS,
    PYTHON,
    deployment,
    eventually,
    first_status,
    log_of,
    python,
    ready_pods,
)
from tests.fakes.waiting import wait_until

# A container as hard to end as can be: a child and a grandchild in a session of its own, which has no environment,
# all of them deaf to SIGTERM. Prints its pids.
TREE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    if os.fork() == 0:
        if os.fork() == 0:
            if sys.flags.isolated:
                os.setsid()
            print(os.getpid(), flush=True)
            time.sleep(600)
        print(os.getpid(), flush=True)
        time.sleep(600)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""

CONTROL_PLANE = """
import asyncio, sys
from pathlib import Path
from specserve_operator.cluster.local import LocalCluster, LocalOptions
sys.path.insert(0, sys.argv[2])
from tests.component.local_cluster_support import deployment, python, ready_pods
async def main():
    async with LocalCluster(Path(sys.argv[1]), LocalOptions(orphan_grace_seconds=0.5)) as cluster:
        await cluster.apply(deployment("a", python(sys.argv[3])))
        (pod,) = await ready_pods(cluster, "a")
        print(pod["metadata"]["name"], flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
ROOT = Path(__file__).parents[2]


def is_alive(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and stat.is_alive


def pids_in(log: Path) -> list[int]:
    return [int(word) for word in log.read_text().split()] if log.exists() else []


@pytest.fixture
def tree_code() -> str:
    return TREE


def start_control_plane(state: Path) -> tuple[subprocess.Popen[str], list[int], int]:
    """A control plane in a process of its own; also the pids of its container and of the container's shim."""
    process = subprocess.Popen(
        [PYTHON, "-c", CONTROL_PLANE, str(state), str(ROOT), TREE], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pod = process.stdout.readline().strip()
    folder = state / "pods" / "default" / pod
    wait_until(lambda: len(pids_in(folder / "engine.log")) == 3)
    shim = int(json.loads((folder / "run" / "engine.json").read_text())["shim"])
    return process, pids_in(folder / "engine.log"), shim


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_killed_control_plane_leaves_nothing(tmp_path: Path) -> None:
    process, pids, shim = start_control_plane(tmp_path / "state")
    assert all(is_alive(pid) for pid in [*pids, shim])
    kill(process)
    wait_until(lambda: not any(is_alive(pid) for pid in [*pids, shim]))


async def test_next_control_plane_cleans_up_what_killed_control_plane_and_shim_left(tmp_path: Path) -> None:
    process, pids, shim = start_control_plane(tmp_path / "state")
    os.kill(process.pid, signal.SIGSTOP)  # or it would clean up after its shim
    os.kill(shim, signal.SIGKILL)
    kill(process)
    assert any(is_alive(pid) for pid in pids)
    async with LocalCluster(tmp_path / "state", OPTIONS) as cluster:
        assert not any(is_alive(pid) for pid in pids)
        assert cluster.list_objects("Pod") == []


async def test_killed_shim_is_a_crash_of_the_whole_container(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path / "state", OPTIONS) as cluster:
        await cluster.apply(deployment("a", python(TREE), terminationGracePeriodSeconds=0.2))
        (pod,) = await ready_pods(cluster, "a")
        folder = cluster.state.pod("default", pod["metadata"]["name"])
        await eventually(lambda: len(pids_in(folder / "engine.log")) == 3)
        pids = pids_in(folder / "engine.log")
        os.kill(int(json.loads((folder / "run" / "engine.json").read_text())["shim"]), signal.SIGKILL)
        status = await eventually(
            lambda: (s := first_status(cluster, "a"))["restartCount"] == 1 and "running" in s["state"] and s
        )
        assert not any(is_alive(pid) for pid in pids)
        ended = status["lastState"]["terminated"]
        assert ended["exitCode"] == 137
        assert ended["message"] == "the process that supervises the container was killed"
        await eventually(lambda: len(log_of(cluster, pod).split()) == 3)


async def test_deaf_process_tree_ends_with_its_pod(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path / "state", OPTIONS) as cluster:
        await cluster.apply(deployment("a", python(TREE), terminationGracePeriodSeconds=0.2))
        (pod,) = await ready_pods(cluster, "a")
        await eventually(lambda: len(log_of(cluster, pod).split()) == 3)
        pids = [int(word) for word in log_of(cluster, pod).split()]
    assert not any(is_alive(pid) for pid in pids)
