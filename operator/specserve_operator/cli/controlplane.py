"""The whole control plane on one machine: local cluster, reconciler and API, started and ended in order."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specserve_operator.cli.errors import EXIT_FORCED
from specserve_operator.cli.server import ControlPlaneApi
from specserve_operator.cluster.local import LocalCluster, LocalOptions
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest
from specserve_operator.runtime.clock import SystemClock
from specserve_operator.runtime.collector import CollectorOptions, StatsCollector
from specserve_operator.runtime.reconciler import Reconciler


@dataclass(frozen=True, slots=True)
class Options:
    """Where the control plane keeps its state, and how it is set."""

    state_dir: Path
    config: OperatorConfig
    local: LocalOptions = field(default_factory=LocalOptions)


Observer = Callable[[LocalCluster], Coroutine[Any, Any, None]]


async def run_control_plane(
    options: Options,
    *,
    manifests: Sequence[Manifest] = (),
    observe: Observer | None = None,
    say: Callable[[str], None],
) -> None:
    """Runs until SIGINT, SIGTERM or `specserve down`, then ends every pod. A second signal kills them all.

    `manifests` are applied first: if they are refused nothing is started. `observe` runs beside the rest until
    the last pod is gone. Raises `InvalidManifest`, `PreflightError` and `ClusterError`, and after a second signal
    `SystemExit`.
    """
    stop, force = asyncio.Event(), asyncio.Event()
    _end_on_signals(stop, force, say=say)
    drain_seconds = options.local.shutdown_seconds
    observer: asyncio.Task[None] | None = None
    killer: asyncio.Task[None] | None = None
    try:
        async with LocalCluster(options.state_dir, options=options.local) as cluster:
            api = ControlPlaneApi(cluster, options.config, on_shut_down=stop.set)
            killer = asyncio.create_task(_kill_when(force, cluster), name="killer")
            await api.apply(manifests)
            if observe is not None:
                observer = asyncio.create_task(observe(cluster), name="observer")
                observer.add_done_callback(lambda _: stop.set())
            async with api.serve(options.state_dir):
                await _reconcile(cluster, options.config, stop)
                say(f"stopping: pods have {drain_seconds:g} s to finish their requests (Ctrl-C again kills them)")
    finally:
        if killer is not None:
            killer.cancel()
        if observer is not None:
            observer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await observer
    if force.is_set():
        say("ended by force")
        raise SystemExit(EXIT_FORCED)
    say("stopped")


async def _kill_when(force: asyncio.Event, cluster: LocalCluster) -> None:
    await force.wait()
    cluster.kill_pods()


async def _reconcile(cluster: LocalCluster, config: OperatorConfig, stop: asyncio.Event) -> None:
    clock = SystemClock()
    options = CollectorOptions(window_seconds=config.stats_window_seconds)
    stats = StatsCollector(cluster, clock=clock, options=options)
    await Reconciler(cluster, config, stats, clock).run(stop)


def _end_on_signals(stop: asyncio.Event, force: asyncio.Event, *, say: Callable[[str], None]) -> None:
    """The first signal sets `stop`, the second `force` as well; a third one does not even wait for that."""

    def on_signal() -> None:
        if not stop.is_set():
            stop.set()
            return
        if not force.is_set():
            say("killing all pods")
            force.set()
            return
        sys.stderr.flush()
        # Pods do not outlive the control plane: their supervisors end them when it is gone.
        os._exit(EXIT_FORCED)

    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, on_signal)
