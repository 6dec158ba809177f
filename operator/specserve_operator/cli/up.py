"""`specserve up`: everything on this machine, in the foreground or (`--wait`) in the background."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from specserve_operator.cli.client import ApiError, Client
from specserve_operator.cli.daemon import LOG_NAME, Daemon, start_daemon, write_log_to
from specserve_operator.cli.errors import CliError
from specserve_operator.cli.manifests import check_runs_here, key_of
from specserve_operator.cli.progress import (
    Failure,
    View,
    describe_changes,
    find_failure,
    find_obstacle,
    is_ready,
)
from specserve_operator.constants import LABEL_SERVICE
from specserve_operator.core.objects import Manifest, ServiceKey

_POLL_SECONDS = 0.25
_STOP_TIMEOUT_SECONDS = 45.0
_LOG_LINES_SHOWN = 15


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service that is ready, and where."""

    namespace: str
    name: str
    endpoint: str


class Progress:
    """Lines about what changed, each once; on a terminal with a spinner below them."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._seen: dict[ServiceKey, View] = {}

    def say(self, line: str) -> None:
        """Prints a line as it is."""
        self._console.print(line, markup=False)

    def show(self, key: ServiceKey, view: View) -> None:
        """Prints what changed about a service since it was last shown."""
        for line in describe_changes(self._seen.get(key, View()), view):
            self.say(line)
        self._seen[key] = view

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Shows that something is awaited; nothing where nobody watches."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(text):
            yield


def up_in_background(
    manifests: Sequence[Manifest], *, state_dir: Path, timeout_seconds: float, progress: Progress
) -> list[Endpoint]:
    """Starts a control plane if none runs, applies the services and waits until all are ready.

    If one of them fails or the time runs out, what was started here is ended again. Raises `CliError`.
    """
    client = Client(state_dir)
    daemon: Daemon | None = None
    if not client.is_running():
        check_runs_here(manifests)
        daemon = start_daemon(state_dir)
        pid = daemon.process.pid if daemon is not None else client.info()["pid"]
        progress.say(f"control plane: running (pid {pid}, state in {state_dir})")
    try:
        client.apply(manifests)
        keys = [key_of(manifest) for manifest in manifests]
        with progress.waiting("waiting until ready"):
            return _wait_until_ready(client, keys, timeout_seconds=timeout_seconds, progress=progress)
    except BaseException:
        if daemon is not None:
            progress.say("stopping what was started")
            daemon.stop(timeout_seconds=_STOP_TIMEOUT_SECONDS)
        raise


def _wait_until_ready(
    client: Client, keys: Sequence[ServiceKey], *, timeout_seconds: float, progress: Progress
) -> list[Endpoint]:
    deadline = time.monotonic() + timeout_seconds
    while True:
        views = {key: _look(client.list_objects, key) for key in keys}
        for key, view in views.items():
            progress.show(key, view)
            if failure := find_failure(view):
                raise CliError(f"service {key.name} failed: {_explain(client, key, failure)}")
        if all(is_ready(view.service) for view in views.values()):
            return [_endpoint(view.service) for view in views.values() if view.service is not None]
        if time.monotonic() > deadline:
            late = next(key for key, view in views.items() if not is_ready(view.service))
            obstacle = find_obstacle(views[late])
            why = _explain(client, late, obstacle) if obstacle else "it has no status yet"
            raise CliError(f"service {late.name} is not ready after {timeout_seconds:g} s: {why}")
        time.sleep(_POLL_SECONDS)


def _explain(client: Client, key: ServiceKey, failure: Failure) -> str:
    lines = [f"{failure.condition} is false ({failure.reason})" + (f": {failure.message}" if failure.message else "")]
    if failure.pod is not None and (log := _last_log_lines(client, key.namespace, failure.pod)):
        lines.append(f"last lines of pod {failure.pod}:")
        lines += [f"  {line}" for line in log]
    return "\n".join(lines)


def _last_log_lines(client: Client, namespace: str, pod: str) -> list[str]:
    """The end of a pod's log; of the run before where the present one has said nothing yet."""
    for previous in (False, True):
        try:
            text = "".join(client.log_lines(namespace, pod, previous=previous, tail_lines=_LOG_LINES_SHOWN))
        except ApiError:
            continue
        if text.strip():
            return text.rstrip("\n").splitlines()
    return []


def _endpoint(service: Manifest) -> Endpoint:
    key = key_of(service)
    return Endpoint(key.namespace, key.name, str(service["status"].get("endpoint") or ""))


def _look(list_objects: Callable[..., Sequence[Manifest]], key: ServiceKey) -> View:
    services = list_objects("SpeculativeService", namespace=key.namespace)
    pods = list_objects("Pod", namespace=key.namespace)
    return View(
        service=next((s for s in services if s["metadata"]["name"] == key.name), None),
        pods=[p for p in pods if p["metadata"].get("labels", {}).get(LABEL_SERVICE) == key.name],
    )


def up_in_foreground(manifests: Sequence[Manifest], *, state_dir: Path, progress: Progress) -> None:
    """Runs the control plane here until it is told to end, and says what happens. Raises `CliError`."""
    from specserve_operator.cli.controlplane import Options, run_control_plane
    from specserve_operator.cli.settings import local_config
    from specserve_operator.cluster.local import LocalCluster

    check_runs_here(manifests)
    keys = [key_of(manifest) for manifest in manifests]

    async def observe(cluster: LocalCluster) -> None:
        announced: set[ServiceKey] = set()
        while True:
            for key in keys:
                view = _look(cluster.list_objects, key)
                progress.show(key, view)
                if is_ready(view.service) and view.service is not None:
                    if key not in announced:
                        progress.say(f"service/{key.name}: serving at {_endpoint(view.service).endpoint}")
                    announced.add(key)
                else:
                    announced.discard(key)
            await asyncio.sleep(_POLL_SECONDS)

    state_dir.mkdir(parents=True, exist_ok=True)
    # The terminal shows what happens to the services; what the control plane says of itself goes to a file.
    with (state_dir / LOG_NAME).open("a") as log:
        write_log_to(log)
        options = Options(state_dir, local_config())
        asyncio.run(run_control_plane(options, manifests=manifests, observe=observe, say=progress.say))
