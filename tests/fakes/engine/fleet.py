"""Serves the control ports of many pods in one process, each on an address of its own, for tests of scale.

    python -m tests.fakes.engine.fleet --pods FILE [--port 9000] [--identity FOLDER]

FILE is a JSON list of objects with the fields of `fleet_pod.FleetPod`; `write_pods` makes one. When it changes, pods
come, go, or behave otherwise. For every list that is in force a line `N pods` is printed. In a test's own process, use
`Fleet`.

Every pod has a server of its own: that costs 0.05 MB and a millisecond, another 0.03 MB with its connection, and lets
each have its own certificate, from FOLDER/<uid>.
"""

import argparse
import asyncio
import dataclasses
import ipaddress
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from specserve_workers.control.service import ControlServer
from specserve_workers.identity.channels import ServerTls, operator_rule
from specserve_workers.identity.material import MaterialFiles
from tests.fakes.engine.behaviour import BehaviourError
from tests.fakes.engine.fleet_pod import FleetMember, FleetPod

DEFAULT_PORT: Final = 9000
FIRST_ADDRESS: Final = "127.90.0.1"
POLL_SECONDS: Final = 0.5

PodTls = Callable[[FleetPod], ServerTls | None]


class FleetError(ValueError):
    """A list of pods that cannot be served. Names the pod or the field."""


def plaintext(pod: FleetPod) -> None:
    """No certificate for any pod."""


def certified(folder: Path) -> PodTls:
    """Certificates in `folder`/<uid of the pod>, as a worker keeps its own. Only the operator may call."""
    return lambda pod: ServerTls(MaterialFiles(folder / pod.uid), operator_rule())


def make_pods(count: int, *, first_address: str = FIRST_ADDRESS, **fields: Any) -> list[FleetPod]:
    """So many pods on consecutive addresses; `fields` are those of all of them."""
    first = ipaddress.IPv4Address(first_address)
    return [FleetPod(name=f"fleet-{i}", uid=f"uid-fleet-{i}", ip=str(first + i), **fields) for i in range(count)]


def write_pods(file: Path, pods: Iterable[FleetPod]) -> None:
    """Writes a list in one step, so that a fleet never reads half of it."""
    draft = file.with_name(f".{file.name}.new")
    draft.write_text(json.dumps([dataclasses.asdict(pod) for pod in pods]), encoding="utf-8")
    draft.replace(file)


def read_pods(file: Path) -> list[FleetPod]:
    """Raises FleetError."""
    try:
        return [FleetPod(**fields) for fields in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(f"{file}: {error}") from error


class Fleet:
    """Servers of any number of pods, in the running event loop.

    Args:
        port: the same for all pods.
        tls: certificates of a pod's server, and who may call it; None for plain text.
    """

    def __init__(self, *, port: int = DEFAULT_PORT, tls: PodTls = plaintext) -> None:
        self._port = port
        self._tls = tls
        self._servers: dict[str, ControlServer] = {}
        self.members: dict[str, FleetMember] = {}
        _allow_files()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.set_pods(())

    async def set_pods(self, pods: Sequence[FleetPod]) -> None:
        """Serves these pods and no others. Those that are there already go on, with their statistics.

        Raises:
            FleetError: two pods have one address, an address is taken, or a behaviour is none.
        """
        wanted = {pod.ip: pod for pod in pods}
        if len(wanted) != len(pods):
            raise FleetError("several pods have the same address")
        gone = [ip for ip, member in self.members.items() if ip not in wanted or not _is_same(member.pod, wanted[ip])]
        await asyncio.gather(*(self._servers.pop(ip).stop(0) for ip in gone))
        for ip in gone:
            del self.members[ip]
        try:
            for pod in pods:
                if pod.ip in self.members:
                    self.members[pod.ip].update(pod)
                else:
                    await self._start(pod)
        except (BehaviourError, OSError) as error:
            raise FleetError(f"pod {pod.name}: {error}") from error

    async def _start(self, pod: FleetPod) -> None:
        member = FleetMember(pod)
        server = ControlServer(member, tls=self._tls(pod))
        await server.start(pod.ip, self._port)
        self.members[pod.ip], self._servers[pod.ip] = member, server


def _is_same(pod: FleetPod, other: FleetPod) -> bool:
    return pod.endpoint == other.endpoint and pod.max_draft_tokens == other.max_draft_tokens


def _allow_files() -> None:
    """Every server and every connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve_file(file: Path, fleet: Fleet, *, stop: asyncio.Event) -> None:
    """Serves the pods of a file, as it is at any moment, until `stop`. Raises FleetError for the first list only."""
    async with fleet:
        seen = _mark(file)
        await fleet.set_pods(read_pods(file))
        _say(f"{len(fleet.members)} pods")
        while not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL_SECONDS)
            if (mark := _mark(file)) != seen:
                seen = mark
                try:
                    await fleet.set_pods(read_pods(file))
                except FleetError as error:
                    _say(f"not in force: {error}")
                _say(f"{len(fleet.members)} pods")


def _mark(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.fakes.engine.fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=Path, required=True, metavar="FILE")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--identity", type=Path, metavar="FOLDER", help="certificates; absent: plaintext")
    options = parser.parse_args(argv)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        tls = plaintext if options.identity is None else certified(options.identity)
        await serve_file(options.pods, Fleet(port=options.port, tls=tls), stop=stop)

    try:
        asyncio.run(run())
    except FleetError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
