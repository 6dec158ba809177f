"""The operator process: everything wired together, started and ended in order."""

import asyncio
import gc
import logging
import platform
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace

import kopf

from specserve_operator.cluster.kube.client import KubeClient
from specserve_operator.cluster.kube.cluster import KubeCluster, keep_in_step
from specserve_operator.cluster.kube.discovery import Offer, find_kinds, find_offer
from specserve_operator.cluster.kube.events import EventRecorder
from specserve_operator.cluster.kube.health import WatchHealth
from specserve_operator.cluster.kube.kinds import OPTIONAL, POD_MONITOR, WATCHED, Kind
from specserve_operator.cluster.kube.lease import Lease, run_as_leader
from specserve_operator.cluster.kube.login import load_configuration
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest
from specserve_operator.handlers import NoMemories, build_registry, kopf_settings
from specserve_operator.issuing import Issuing, IssuingOptions
from specserve_operator.metrics import OperatorMetrics
from specserve_operator.probes import metrics_app, probes_app, serving
from specserve_operator.runtime.clock import Clock, SystemClock, sleep
from specserve_operator.runtime.collector import CollectorOptions, StatsCollector
from specserve_operator.runtime.control_channels import ControlChannels
from specserve_operator.runtime.reconciler import Reconciler

_LOG = logging.getLogger(__name__)

# Generous: a restart costs a full list of everything, and heals only what hangs for good.
_MAX_KEY_AGE_SECONDS = 600.0
_MAX_WATCH_LAG_SECONDS = 300.0
_RETRY_SECONDS = 2.0
# How often to look for CRDs that were installed, upgraded or removed, and how long to let them settle.
_OFFER_SECONDS, _OFFER_SETTLE_SECONDS = 10.0, 1.0
# With 20,000 objects, each look through all of them stops everything else for a quarter of a second. Python's own
# thresholds cause one every minute.
_GC_THRESHOLDS = (20_000, 20, 50)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Options:
    """How the process is set. `namespaces`: those that are watched; none stands for the whole cluster.

    `host`: the address that probes and metrics listen on; None for all of them.
    `sweep_seconds`: how often everything is listed though no watch was interrupted: nothing should come of it.
    `unwatched_sweep_seconds`: how often the kinds are that have no watch.
    """

    config: OperatorConfig
    namespaces: tuple[str, ...] = ()
    pod_name: str = platform.node()
    pod_namespace: str = "default"
    host: str | None = None
    health_port: int = 8080
    metrics_port: int = 9090
    leader_election_lease: str | None = None
    issuing: IssuingOptions | None = None
    sweep_seconds: float = 1800.0
    unwatched_sweep_seconds: float = 300.0


class Operator:
    """The parts that live as long as the process, and how healthy they are."""

    def __init__(self, client: KubeClient, options: Options, offer: Offer, *, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.metrics = OperatorMetrics()
        self.health = WatchHealth(self.clock.time, namespaces=options.namespaces)
        recorder = EventRecorder(client, now=self.clock.utc_now, reporter=options.pod_name)
        self.cluster = KubeCluster(
            client, recorder, self.health, namespaces=options.namespaces, on_apply=self._on_apply
        )
        window_seconds = options.config.stats_window_seconds
        self._config = options.config
        self._are_settings_changed = asyncio.Event()
        self._is_optional_refused = asyncio.Event()
        self.issuing = None if options.issuing is None else self._make_issuing(client, options.issuing)
        self.stats = StatsCollector(
            self.cluster,
            clock=self.clock,
            options=CollectorOptions(window_seconds=window_seconds),
            channels=ControlChannels(tls=self.issuing.tls if self.issuing else None),
        )
        self.reconciler = Reconciler(
            self.cluster, options.config, self.stats, self.clock, on_reconciled=self.metrics.reconciled
        )
        self.is_synced = False
        self.relisted = asyncio.Event()
        self._first_versions: dict[tuple[Kind, str | None], int] = {}
        self._offer = Offer(OPTIONAL)
        self.take(offer)
        self._show_gauges()

    def _make_issuing(self, client: KubeClient, options: IssuingOptions) -> Issuing:
        return Issuing(
            client,
            self.cluster.cache,
            options,
            now=self.clock.utc_now,
            time=self.clock.time,
            on_change=self._are_settings_changed.set,
            on_call=self.metrics.certified,
        )

    async def reconcile(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, by the settings of now. Before that nothing may wait in line: nobody works."""
        await self._reconfigure()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follow_settings(), name="settings")
            await self.reconciler.run(stop)
            following.cancel()

    async def _follow_settings(self) -> None:
        """Has every service looked at anew whenever other authorities are trusted or other CRDs installed. For ever."""
        while True:
            await self._are_settings_changed.wait()
            await self._reconfigure()

    async def _reconfigure(self) -> None:
        self._are_settings_changed.clear()
        self.reconciler.crd_problem = self._offer.crds.problem
        trust_bundle = "" if self.issuing is None else self.issuing.trust_bundle
        has_pod_monitors = POD_MONITOR in self._offer.optional
        await self.reconciler.reconfigure(
            replace(self._config, trust_bundle=trust_bundle, pod_monitors=has_pod_monitors)
        )

    async def follow_offer(self, client: KubeClient) -> None:
        """Notices CRDs that are installed, upgraded or removed: in time, or as soon as one is missed. For ever."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_optional_refused.wait(), _OFFER_SECONDS)
                await asyncio.sleep(_OFFER_SETTLE_SECONDS)
            self._is_optional_refused.clear()
            try:
                self.take(await find_offer(client, self._offer))
            except ClusterError as error:
                _LOG.warning("it is not known whether the CRDs are still the same: %s", error)

    def take(self, offer: Offer) -> None:
        """Goes on with other optional kinds and CRDs than before."""
        before, self._offer = self._offer, offer
        if offer == before:
            return
        for kind in set(offer.optional) - set(before.optional):
            _LOG.info("%s are installed by now: services get theirs", kind.plural)
        for kind in set(before.optional) - set(offer.optional):
            _LOG.info("%s are not installed: services get none", kind.plural)
            self.cluster.cache.keep_only(kind, None, listed=(), version=0)
        if offer.crds.problem:
            _LOG.warning("%s", offer.crds.problem)
        elif before.crds.problem:
            _LOG.info("the installed CRDs are those of this version by now")
        self.cluster.kinds = tuple(kind for kind in WATCHED if not kind.is_optional or kind in offer.optional)
        self.cluster.status_schemas = offer.crds.status_schemas
        self._are_settings_changed.set()

    def _on_apply(self, kind: str, outcome: str) -> None:
        self.metrics.applied(kind, outcome)
        if outcome == "refused" and kind in {optional.name for optional in OPTIONAL}:
            self._is_optional_refused.set()

    def _show_gauges(self) -> None:
        queue, metrics = self.reconciler.queue, self.metrics
        metrics.gauge("specserve_operator_workqueue_depth", "Services that wait for a reconcile.", lambda: len(queue))
        metrics.gauge(
            "specserve_operator_workqueue_oldest_key_age_seconds",
            "How long the service that has waited longest has been due.",
            queue.oldest_age_seconds,
        )
        metrics.gauge(
            "specserve_operator_watch_age_seconds",
            "For how long a watch has not shown what a list did; 0 while all watches are in step.",
            self.health.behind_seconds,
        )
        metrics.gauge("specserve_operator_cached_objects", "Remembered objects.", lambda: len(self.cluster.cache))
        metrics.show_conditions(self.cluster.cache)

    def on_event(self, kind: Kind, type_: str | None, obj: Manifest) -> None:
        """Takes in what a watch has seen."""
        self.health.on_event(kind, obj)
        if type_ == "DELETED":
            self.cluster.forget(kind, obj)
        else:
            self.cluster.observe(kind, obj)

    def on_watch(self, kind: Kind, namespace: str | None, version: int) -> int:
        """A watch begins. Returns from which version on.

        The first goes on from the list at the start. A later one could not go on from where it was: what happened until
        `version` does not show, so everything is listed again.
        """
        listed = self._first_versions.pop((kind, namespace), 0)
        self.health.on_watch(kind, namespace, listed or version)
        if not listed:
            self.relisted.set()
        return listed or version

    async def list_everything(self) -> None:
        """Fills the cache. A kind that was just installed is refused for a moment, which is no reason to give up.

        Raises:
            ClusterError: that does not pass by waiting.
        """
        while True:
            try:
                await self.cluster.sweep()
            except ClusterError as error:
                if not error.retryable:
                    raise
                _LOG.warning("the cluster was not listed: %s", error)
                await sleep(self.clock, _RETRY_SECONDS)
            else:
                break
        self._first_versions = dict(self.cluster.listed)

    def check_queue(self) -> str | None:
        """Liveness: no service waits, or is worked on, for ever."""
        age = max(self.reconciler.queue.oldest_age_seconds(), self.reconciler.queue.longest_held_seconds())
        return f"a service has waited {age:.0f} s for its reconcile" if age > _MAX_KEY_AGE_SECONDS else None

    def check_watches(self) -> str | None:
        """Liveness: no watch is deaf."""
        age = self.health.behind_seconds()
        if age <= _MAX_WATCH_LAG_SECONDS:
            return None
        return f"watches of {', '.join(self.health.watches_behind())} have been silent for {age:.0f} s"

    def check_synced(self) -> str | None:
        """Readiness."""
        return None if self.is_synced else "the cluster has not been listed yet"


async def run(options: Options) -> None:
    """Runs until SIGTERM or SIGINT. Raises `ClusterError` where it cannot start, or has to be started anew."""
    work = asyncio.create_task(_run(options), name="operator")
    # Before anything waits: without a handler, the first process of a container ignores a signal.
    _on_signals(work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not work.cancelled():
            raise
        _LOG.info("stopped before the start was over")


async def _run(options: Options) -> None:
    gc.set_threshold(*_GC_THRESHOLDS)
    configuration = await load_configuration()
    async with KubeClient(configuration) as client:
        await find_kinds(client, WATCHED)
        operator = Operator(client, options, await find_offer(client))
        async with AsyncExitStack() as stack:
            probes = probes_app(live=[operator.check_queue, operator.check_watches], ready=[operator.check_synced])
            await stack.enter_async_context(serving(probes, options.host, options.health_port))
            metrics = metrics_app(operator.metrics.render)
            await stack.enter_async_context(serving(metrics, options.host, options.metrics_port))

            await _operate(client, operator, options)


async def _operate(client: KubeClient, operator: Operator, options: Options) -> None:
    """Watches and reconciles until kopf ends, which it does on a signal; then the workers finish their step."""
    stop = asyncio.Event()
    await operator.list_everything()
    # What is there by now stays, mostly: it need not be looked through again and again.
    gc.collect()
    gc.freeze()
    _LOG.info("%d services, %d objects in all", len(operator.cluster.cache.services()), len(operator.cluster.cache))
    async with AsyncExitStack() as stack:
        if operator.issuing is not None:
            await operator.issuing.load()
            await stack.enter_async_context(operator.issuing.serving())
        operator.is_synced = True
        try:
            await _run_parts(client, operator, options, stop=stop)
        except BaseExceptionGroup as group:
            raise _first_cause(group) from group


def _on_signals(act: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, act)


async def _stop_in_order(
    stop: asyncio.Event, reconciling: asyncio.Task[None], *, kopf_ready: asyncio.Event, kopf_stop: asyncio.Event
) -> None:
    """Takes the signals over from kopf, which cancels every task in the process when it ends: steps that are under way
    come to their end and the Lease is given back before that."""
    await kopf_ready.wait()
    _on_signals(stop.set)
    await stop.wait()
    await asyncio.wait([reconciling])
    kopf_stop.set()


def _first_cause(error: BaseException) -> BaseException:
    """What ended the first of the parts; the others were only cancelled."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run_parts(client: KubeClient, operator: Operator, options: Options, *, stop: asyncio.Event) -> None:
    """All of them at once. One that waits for the Lease watches and gives certificates, so that it can take over."""
    async with asyncio.TaskGroup() as group:
        cluster, never = operator.cluster, asyncio.Event()
        endless = [
            group.create_task(
                keep_in_step(cluster.sweep, operator.relisted, period_seconds=options.sweep_seconds), name="sweep"
            ),
            group.create_task(
                keep_in_step(cluster.sweep_unwatched, never, period_seconds=options.unwatched_sweep_seconds),
                name="sweep-unwatched",
            ),
            group.create_task(operator.follow_offer(client), name="offer"),
        ]
        if operator.issuing is not None:
            group.create_task(operator.issuing.run(stop), name="authority")
        reconciling = group.create_task(reconcile_alone(client, operator, options, stop), name="reconciler")
        kopf_ready, kopf_stop = asyncio.Event(), asyncio.Event()
        group.create_task(_stop_in_order(stop, reconciling, kopf_ready=kopf_ready, kopf_stop=kopf_stop), name="signals")
        watched = tuple(kind for kind in WATCHED if not kind.is_optional)
        await kopf.operator(
            registry=build_registry(watched, operator.on_event, on_watch=operator.on_watch),
            settings=kopf_settings(watched, pod_name=options.pod_name),
            memories=NoMemories(),
            # Left to find one by itself, kopf asks for the user's name, which a pod's user has not.
            identity=options.pod_name,  # type: ignore[arg-type]  # a str, by a name that kopf keeps to itself
            standalone=True,
            clusterwide=not options.namespaces,
            namespaces=options.namespaces,
            ready_flag=kopf_ready,
            stop_flag=kopf_stop,
        )
        stop.set()
        for task in endless:
            task.cancel()


async def reconcile_alone(client: KubeClient, operator: Operator, options: Options, stop: asyncio.Event) -> None:
    """Alone among all operators: at once, or as soon as the Lease is ours. Raises `LeaseLostError`."""
    if options.leader_election_lease is None:
        await operator.reconcile(stop)
        return
    time = operator.clock.time
    lease = Lease(
        client,
        namespace=options.pod_namespace,
        name=options.leader_election_lease,
        identity=options.pod_name,
        time=time,
    )
    leading = asyncio.ensure_future(run_as_leader(lease, lambda: operator.reconcile(stop), time=time))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([leading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not lease.is_held:
            leading.cancel()  # it only waits for its turn
        await asyncio.wait([leading])
    finally:
        leading.cancel()
        stopping.cancel()
    if not leading.cancelled():
        leading.result()
