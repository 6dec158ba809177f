"""O1-O5: one operator with a thousand services, beside an operator in Go with as many objects of its own.

    python -m bench.operator_scale [--services N] [--changes N] [--idle-seconds N]

O1  memory of the operator, at its most, MiB                                                          <= 300
O2  p99 of the time from a spec's change to its children's, s, all other services idle                <= 2
O3  from the start of the process until every service was reconciled and every pod asked, s           <= 120
O4  processor while nothing changes but the pods' statistics, cores                                   <= 0.25
O5  O2 over the same of the Go operator, on the same API server, changes by turns                     <= 3

Every service has three control ports that answer over mutual TLS, each with a certificate of its pod. API server,
etcd, controllers and pods share the machine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bench.pairs import BOOTSTRAP_SAMPLES, Claim, write_results
from bench.scale.contestants import NAMESPACES, Contestant, Specserve, Step, namespace_of
from bench.scale.lws import LeaderWorkerSet
from bench.scale.pods import Report
from hack.kube.commands import TOOLS, installed
from hack.kube.control_plane import ControlPlane
from tests.cluster.api import MERGE_PATCH, Api, BackgroundLoop

CRDS = Path(__file__).resolve().parent.parent / "crds"
BARS = {"O1": 300.0, "O2": 2.0, "O3": 120.0, "O4": 0.25, "O5": 3.0}
CREATED_AT_ONCE = 16
SETTLE_SECONDS = 1800.0
# Between two changes.
PAUSE_SECONDS = (0.05, 0.25)
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process. `peak_mib`: since its start."""

    cpu_seconds: float
    resident_mib: float
    peak_mib: float


def usage(pid: int) -> Usage:
    """What a process has used so far."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident, peak = (int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return Usage(sum(map(int, ticks)) / TICKS, resident, peak)


class Bench:
    """One API server, the pods, and the operators that are compared."""

    def __init__(
        self, background: BackgroundLoop, api: Api, contestants: list[Contestant], *, count: int, report_file: Path
    ) -> None:
        self._background = background
        self._api = api
        self.contestants = contestants
        self._count = count
        self._report_file = report_file

    def report(self) -> Report | None:
        """What the pods last said of themselves."""
        with contextlib.suppress(FileNotFoundError):
            return Report(**json.loads(self._report_file.read_text()))
        return None

    def create_all(self, contestant: Contestant) -> float:
        """Creates every object; returns after how many seconds all were as asked."""
        began = time.monotonic()

        def create(number: int) -> None:
            self._api.request("POST", contestant.collection(number), body=contestant.manifest(number))

        with ThreadPoolExecutor(CREATED_AT_ONCE) as pool:
            for _ in pool.map(create, range(self._count)):
                pass
        self._wait(lambda: self._settled(contestant) == self._count, what=f"all of {contestant.name} are as asked")
        return time.monotonic() - began

    def _settled(self, contestant: Contestant) -> int:
        found = self._api.request("GET", "/".join(contestant.objects))["items"]
        count = sum(contestant.is_settled(obj) for obj in found)
        say(f"{contestant.name}: {count} of {self._count} are as asked; {usage(contestant.pid).resident_mib:.0f} MiB")
        return count

    def _wait(self, check: Callable[[], bool], *, what: str, pause_seconds: float = 15.0) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not check():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {SETTLE_SECONDS:.0f} s: {what}")
            time.sleep(pause_seconds)

    def wait_served(self) -> None:
        """Returns when every control port is served and was asked."""

        def is_so() -> bool:
            found = self.report()
            return found is not None and found.served == 3 * self._count and found.oldest_call_seconds < float("inf")

        self._wait(is_so, what="every pod was asked for its statistics")

    def idle(self, seconds: float) -> dict[str, dict[str, float]]:
        """What the operators use while nothing changes."""
        before = {c.name: usage(c.pid) for c in self.contestants}
        calls = self.report()
        began = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        after = {c.name: usage(c.pid) for c in self.contestants}
        later = self.report()
        assert calls is not None
        assert later is not None
        result = {
            name: {
                "cores": round((after[name].cpu_seconds - before[name].cpu_seconds) / passed, 4),
                "resident_mib": round(after[name].resident_mib, 1),
            }
            for name in before
        }
        result["specserve"]["calls_per_second"] = round((later.calls - calls.calls) / passed, 1)
        return result

    async def _change(self, contestant: Contestant, number: int, step: Step) -> float:
        """Seconds from the API server's yes to a change of the spec until a child is as it asks."""
        patch, is_so = step
        prefix, plural = contestant.children
        children = f"{prefix}/namespaces/{namespace_of(number)}/{plural}"
        version = (await self._api.aio.request("GET", children, query={"limit": "1"}))["metadata"]["resourceVersion"]
        watch = self._api.aio.watch(children, version)

        async def see() -> float:
            async for event in watch:
                if is_so(event["object"]):
                    return time.monotonic()
            raise RuntimeError("the watch has ended")

        async with contextlib.aclosing(watch):
            seeing = asyncio.ensure_future(see())
            await asyncio.sleep(PAUSE_SECONDS[0])
            await self._api.aio.request("PATCH", contestant.path(number), body=patch, content_type=MERGE_PATCH)
            accepted = time.monotonic()
            return max(await seeing - accepted, 0.0)

    def wait_settled(self, contestant: Contestant, number: int) -> None:
        """Returns when an object is as asked."""

        def is_so() -> bool:
            return contestant.is_settled(self._api.request("GET", contestant.path(number)))

        self._wait(is_so, what=f"{contestant.path(number)} is as asked", pause_seconds=0.1)

    def change_by_turns(self, count: int) -> dict[str, dict[str, list[float]]]:
        """Latencies by operator and kind of change. An object is changed when all are as asked, its own included."""
        random_, times = random.Random(0), Counter[int]()
        seconds: dict[str, dict[str, list[float]]] = {c.name: {"scaled": [], "renewed": []} for c in self.contestants}
        for round_ in range(count):
            kind = "renewed" if round_ % 3 == 2 else "scaled"
            number = random_.randrange(self._count)
            for contestant in self.contestants if round_ % 2 else reversed(self.contestants):
                step = (
                    contestant.scaled(number, times[number]) if kind == "scaled" else contestant.renewed(number, round_)
                )
                seconds[contestant.name][kind].append(self._background.run(self._change(contestant, number, step)))
                self.wait_settled(contestant, number)
                time.sleep(random_.uniform(*PAUSE_SECONDS))
            times[number] += kind == "scaled"
            if round_ % 20 == 19:
                say(f"{round_ + 1} changes: " + "; ".join(f"{n} {summary(s)}" for n, s in seconds.items()))
        return seconds

    def restart(self, ours: Specserve) -> dict[str, float]:
        """Kills our operator and starts it anew: when it was ready, had reconciled all, and had asked all pods."""
        ours.kill()
        began = time.monotonic()
        ours.start()
        times = {"ready": time.monotonic() - began}

        def is_reconciled() -> bool:
            ended, waiting = ours.reconciled()
            return ended >= self._count and not waiting

        def are_asked() -> bool:
            found = self.report()
            return found is not None and found.oldest_call_seconds < time.monotonic() - began

        self._wait(is_reconciled, what="every service was reconciled", pause_seconds=0.2)
        times["reconciled"] = time.monotonic() - began
        self._wait(are_asked, what="every pod was asked", pause_seconds=0.2)
        times["asked"] = time.monotonic() - began
        return {name: round(value, 2) for name, value in times.items()} | {"peak_mib": usage(ours.pid).peak_mib}


def summary(seconds: dict[str, list[float]]) -> str:
    """Median and p99 of all kinds of changes."""
    return "{:.0f} / {:.0f} ms".format(*(1000 * np.percentile(list(chain(*seconds.values())), [50, 99])))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@contextlib.contextmanager
def pods_process(control_plane: ControlPlane, report_file: Path, log_file: Path) -> Iterator[None]:
    """All pods, in a process of their own."""
    command = [installed("setpriv"), "--pdeathsig=KILL", "--", sys.executable, "-m", "bench.scale.pods"]
    command += ["--control-plane", str(control_plane.layout.folder), "--report", str(report_file)]
    with log_file.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.kill()


def measure(folder: Path, *, count: int, changes: int, idle_seconds: float) -> dict[str, Any]:
    """All measurements, as data of the results file."""
    report_file = folder / "report.json"
    with contextlib.ExitStack() as stack:
        control_plane = stack.enter_context(ControlPlane(folder / "control-plane", controllers=True, manifests=[CRDS]))
        for number in range(NAMESPACES):
            control_plane.kubectl("create", "namespace", namespace_of(number))
        background = stack.enter_context(BackgroundLoop())
        api = Api(control_plane, background)
        stack.callback(api.close)
        ours, theirs = Specserve(control_plane, folder), LeaderWorkerSet(control_plane, folder / "lws")
        bench = Bench(background, api, [ours, theirs], count=count, report_file=report_file)
        for contestant in bench.contestants:
            stack.callback(contestant.kill)
            contestant.start()
        stack.enter_context(pods_process(control_plane, report_file, folder / "pods.log"))

        data: dict[str, Any] = {"services": count, "created_seconds": {}}
        for contestant in bench.contestants:
            data["created_seconds"][contestant.name] = round(bench.create_all(contestant), 1)
        bench.wait_served()
        say(f"created: {data['created_seconds']}; every pod was asked")
        data["idle"] = bench.idle(idle_seconds)
        say(f"idle: {data['idle']}")
        latencies = bench.change_by_turns(changes)
        data["changes"] = {
            name: {
                kind: {
                    **{f"p{p}": round(float(np.percentile(values, p)), 4) for p in (50, 90, 99)},
                    "most": round(max(values), 4),
                    "seconds": [round(value, 4) for value in values],
                }
                for kind, values in (by_kind | {"all": list(chain(*by_kind.values()))}).items()
            }
            for name, by_kind in latencies.items()
        }
        data["peak_mib"] = {c.name: round(usage(c.pid).peak_mib, 1) for c in bench.contestants}
        data["restart"] = bench.restart(ours)
        say(f"restart: {data['restart']}")
        return data


def claims(data: dict[str, Any]) -> list[Claim]:
    """O1-O5. What was measured once is its own interval."""
    ours, theirs = (np.array(data["changes"][name]["all"]["seconds"]) for name in ("specserve", "lws"))
    draws = np.random.default_rng(0).integers(0, len(ours), size=(BOOTSTRAP_SAMPLES, len(ours)))
    p99, their_p99 = (np.percentile(values[draws], 99, axis=1) for values in (ours, theirs))
    started = max(data["restart"]["reconciled"], data["restart"]["asked"])
    return [
        _once("O1", max(data["peak_mib"]["specserve"], data["restart"]["peak_mib"])),
        _claim("O2", float(np.percentile(ours, 99)), p99),
        _once("O3", started),
        _once("O4", data["idle"]["specserve"]["cores"]),
        _claim("O5", float(np.percentile(ours, 99) / np.percentile(theirs, 99)), p99 / their_p99),
    ]


def _once(claim_id: str, value: float) -> Claim:
    return Claim(claim_id, value, value, value, 1)


def _claim(claim_id: str, value: float, draws: np.ndarray[Any, Any]) -> Claim:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Claim(claim_id, round(value, 4), round(float(low), 4), round(float(high), 4), draws.shape[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=1000, metavar="N")
    parser.add_argument("--changes", type=int, default=300, metavar="N", help="of each operator")
    parser.add_argument("--idle-seconds", type=float, default=300.0, metavar="N")
    parser.add_argument("--folder", type=Path, help="for logs and data, which stay; default: none stay")
    options = parser.parse_args()
    subprocess.run([TOOLS / "build.sh", "kubernetes", "etcd", "helm", "lws"], check=True)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        data = measure(folder, count=options.services, changes=options.changes, idle_seconds=options.idle_seconds)
    rows = claims(data)
    command = f"python -m bench.operator_scale --services {options.services} --changes {options.changes}"
    path = write_results("operator_scale", command, claims=rows, data=data)
    for row in rows:
        verdict = "held" if row.value <= BARS[row.id] else "missed"
        print(f"{row.id}  {row.value:8.3f}  [{row.low:.3f}, {row.high:.3f}]  bar {BARS[row.id]:g}: {verdict}")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
