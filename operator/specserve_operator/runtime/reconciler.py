"""Brings every service to what its spec asks, one step at a time, for ever.

Level-triggered: a change of the service, of a child or of a measurement only says that a service needs a look. What
is done follows from what is there, never from the change; so a missed or repeated wake-up does no harm.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specserve_operator.api.conditions import EventReason
from specserve_operator.api.status import KvTransferStatus
from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.api.validation import InvalidManifest, parse_service
from specserve_operator.cluster.protocol import SEED_FIELD_MANAGER, ApplyOutcome, Cluster, ClusterError
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.events import transition_events
from specserve_operator.core.measurements import stored_kv_transfer
from specserve_operator.core.objects import ApplyFailure, Event, EventType, Manifest, ObjectRef, ServiceKey
from specserve_operator.core.plan import plan
from specserve_operator.core.scalers import compute_scaler_statuses
from specserve_operator.core.snapshot import build_snapshot
from specserve_operator.core.stats import PodStats, TransferTotals
from specserve_operator.core.status import compute_status
from specserve_operator.render import render, render_seeds
from specserve_operator.runtime.clock import Clock, sleep
from specserve_operator.runtime.drift import is_as_rendered
from specserve_operator.runtime.invalid import invalid_event, invalid_status
from specserve_operator.runtime.workqueue import Backoff, QueueShutDown, WorkQueue

_LOG = logging.getLogger(__name__)


class StatsSource(Protocol):
    """Where the latest statistics of pods come from, e.g. `runtime.collector.StatsCollector`."""

    def pod_stats(self, key: ServiceKey) -> Mapping[str, PodStats]:
        """By pod uid; empty where nothing is known."""
        ...

    def kv_transfer(self, key: ServiceKey, service_uid: str) -> TransferTotals:
        """The sum over all pods of this very service that have been heard of: it never shrinks."""
        ...

    def hasten(self) -> None:
        """Called after something was applied that pods may want to know at once."""
        ...

    async def run(self, stop: asyncio.Event, *, wake: Callable[[ServiceKey], None]) -> None:
        """Keeps the statistics fresh until `stop` is set; calls `wake` with services whose statistics changed."""
        ...


@dataclass(frozen=True, slots=True)
class ReconcilerOptions:
    """`resync_seconds`: how often every service is looked at though nothing is known to have changed.

    `refused_retry_seconds`: how long to wait after what a repetition alone will hardly cure (a missing permission).
    `drain_seconds`: how long workers may take to finish their step at the end.
    """

    workers: int = 4
    resync_seconds: float = 300.0
    resync_jitter_ratio: float = 0.2
    refused_retry_seconds: float = 60.0
    drain_seconds: float = 10.0
    backoff: Backoff = field(default_factory=Backoff)


class Reconciler:
    """The control loop over one cluster. `crd_problem`, which may be set anew: what the installed CRDs lack."""

    def __init__(
        self,
        cluster: Cluster,
        config: OperatorConfig,
        stats: StatsSource,
        clock: Clock,
        *,
        options: ReconcilerOptions | None = None,
        on_reconciled: Callable[[str, float], None] = lambda result, seconds: None,
        crd_problem: str = "",
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._stats = stats
        self._clock = clock
        self._options = options or ReconcilerOptions()
        self._on_reconciled = on_reconciled
        self.crd_problem = crd_problem
        self.queue: WorkQueue[ServiceKey] = WorkQueue(clock, backoff=self._options.backoff)
        # Fingerprints of what was last applied: a field that is no longer rendered must be applied away, and does not
        # show as drift.
        self._applied: dict[ServiceKey, dict[ObjectRef, int]] = {}
        # What a service's status said at the first look, before this control plane wrote any, with the service's uid.
        self._found: dict[ServiceKey, tuple[str, KvTransferStatus]] = {}

    async def reconfigure(self, config: OperatorConfig) -> None:
        """Goes on with other settings; every service gets a look. Raises `ClusterError`."""
        self._config = config
        for key in await self._cluster.list_services():
            self.queue.add(key)

    async def reconcile(self, key: ServiceKey) -> float | None:
        """One step of one service. Returns when to look again in seconds; None: only when something changes.

        Raises `ClusterError` if the cluster failed; what could be done then is done.
        """
        manifest = await self._cluster.get_service(key)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            self._applied.pop(key, None)  # the cluster removes the children, which are owned by the service
            self._found.pop(key, None)
            return None
        try:
            service = parse_service(manifest)
        except InvalidManifest as error:
            await self._report_invalid(key, manifest, str(error))
            return None
        children = await self._cluster.list_owned(key)
        snapshot = build_snapshot(
            service,
            children,
            config=self._config,
            now=self._clock.utc_now(),
            pod_stats=self._stats.pod_stats(key),
            kv_transfer=self._stats.kv_transfer(key, service.metadata.uid),
            kv_transfer_found=self._kv_transfer_found(key, service),
            crd_problem=self.crd_problem,
        )
        plan_ = plan(snapshot)
        unsown = await self._sow(render_seeds(plan_))
        refused = await self._apply(key, render(plan_), children) | unsown
        failures = list(refused.values()) or await self._delete(plan_.deletions)
        status = compute_status(snapshot, plan_, [ApplyFailure(ref, str(error)) for ref, error in refused.items()])
        previous = manifest.get("status") or {}
        await self._write_status(key, previous, status)
        for ref, scaler_status in compute_scaler_statuses(snapshot, plan_).items():
            if ref not in refused:
                await self._cluster.patch_child_status(ref, scaler_status)
        for event in transition_events(previous, status, snapshot, plan_):
            await self._cluster.emit(key, event)
        for failure in failures:
            await self._cluster.emit(key, Event(EventType.WARNING, EventReason.APPLY_FAILED, str(failure)))
        _raise_first(failures)
        return plan_.requeue_after_seconds

    def _kv_transfer_found(self, key: ServiceKey, service: SpeculativeService) -> KvTransferStatus:
        """The totals of earlier control planes. A service that was made anew under the same name has none."""
        uid, found = service.metadata.uid, self._found.get(key)
        if found is None or found[0] != uid:
            found = self._found[key] = (uid, stored_kv_transfer(service.status))
        return found[1]

    async def _sow(self, seeds: Iterable[Manifest]) -> dict[ObjectRef, ClusterError]:
        """Makes objects whose fields are to be somebody else's. Returns what could not be made."""
        refused = {}
        for seed in seeds:
            try:
                await self._cluster.apply(seed, field_manager=SEED_FIELD_MANAGER)
            except ClusterError as error:
                refused[ObjectRef.of(seed)] = error
        return refused

    async def _apply(
        self, key: ServiceKey, rendered: Iterable[Manifest], children: Sequence[Manifest]
    ) -> dict[ObjectRef, ClusterError]:
        """Applies what is not so already. One object's failure does not keep the others from being applied.

        Returns what could not be applied.
        """
        live = {ObjectRef.of(child): child for child in children}
        before, applied, refused = (
            self._applied.get(key, {}),
            dict[ObjectRef, int](),
            dict[ObjectRef, ClusterError](),
        )
        is_changed = False
        for obj in rendered:
            ref, fingerprint = ObjectRef.of(obj), hash(repr(obj))
            if before.get(ref) != fingerprint or not is_as_rendered(obj, live.get(ref)):
                try:
                    outcome = await self._cluster.apply(obj)
                except ClusterError as error:
                    refused[ref] = error
                    continue
                is_changed |= outcome is not ApplyOutcome.UNCHANGED
            applied[ref] = fingerprint
        self._applied[key] = applied
        if is_changed:
            self._stats.hasten()
        return refused

    async def _delete(self, refs: Iterable[ObjectRef]) -> list[ClusterError]:
        failures = []
        for ref in refs:
            try:
                await self._cluster.delete(ref)
            except ClusterError as error:
                failures.append(error)
        return failures

    async def _write_status(self, key: ServiceKey, previous: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        if status != previous:
            await self._cluster.patch_status(key, status)

    async def _report_invalid(self, key: ServiceKey, manifest: Manifest, message: str) -> None:
        """A spec that cannot even be read. What runs keeps running; only a new generation can help."""
        previous = manifest.get("status") or {}
        status = invalid_status(manifest, message, now=self._clock.utc_now())
        if status != previous:
            await self._cluster.patch_status(key, status)
            await self._cluster.emit(key, invalid_event(message))

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set; then workers finish the step they are in. An unforeseen error ends it all."""
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._work(), name=f"reconcile-{i}") for i in range(self._options.workers)]
            feeders = [
                group.create_task(self._feed(), name="watch"),
                group.create_task(self._resync(), name="resync"),
            ]
            group.create_task(self._stats.run(stop, wake=self.queue.add), name="statistics")
            await stop.wait()
            for task in feeders:
                task.cancel()
            self.queue.shut_down()
            _, late = await asyncio.wait(workers, timeout=self._options.drain_seconds)
            for task in late:
                task.cancel()

    async def _feed(self) -> None:
        async for key in self._cluster.watch():
            self.queue.add(key)

    async def _resync(self) -> None:
        """Adds every service at once and then from time to time, spread out over many operators by chance."""
        while True:
            try:
                for key in await self._cluster.list_services():
                    self.queue.add(key)
            except ClusterError as error:
                _LOG.warning("services were not listed: %s", error)
            jitter = random.uniform(-1, 1) * self._options.resync_jitter_ratio
            await sleep(self._clock, self._options.resync_seconds * (1 + jitter))

    async def _work(self) -> None:
        while True:
            try:
                key = await self.queue.get()
            except QueueShutDown:
                return
            try:
                await self._step(key)
            finally:
                self.queue.done(key)

    async def _step(self, key: ServiceKey) -> None:
        """One reconcile with its outcome: the only place where errors become retries."""
        began, result = self._clock.time(), "ok"
        try:
            requeue_seconds = await self.reconcile(key)
        except ClusterError as error:
            result, delay = "failed", self._retry(key, error)
            _LOG.warning("%s: %s; trying again in %.1f s", key, error, delay)
        except Exception:
            # A mistake in this program with this one service must not stop the others.
            result, delay = "error", self.queue.add_rate_limited(key)
            _LOG.exception("%s: reconciling failed; trying again in %.1f s", key, delay)
        else:
            self.queue.forget(key)
            if requeue_seconds is not None:
                self.queue.add_after(key, requeue_seconds)
        self._on_reconciled(result, self._clock.time() - began)

    def _retry(self, key: ServiceKey, error: ClusterError) -> float:
        if error.retryable:
            return self.queue.add_rate_limited(key)
        self.queue.add_after(key, self._options.refused_retry_seconds)
        return self._options.refused_retry_seconds


def _raise_first(failures: Sequence[ClusterError]) -> None:
    """Raises the first failure, with the number of the others."""
    if len(failures) == 1:
        raise failures[0]
    if failures:
        first = failures[0]
        raise ClusterError(f"{first} (and {len(failures) - 1} more)", retryable=first.retryable) from first
