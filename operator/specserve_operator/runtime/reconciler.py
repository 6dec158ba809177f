"""Brings every service to what its spec asks, one step at a time, for ever.

Level-triggered: a change of the service, of a child or of a measurement only says that a service needs a look. What
is done follows from what is there, never from the change; so a missed or repeated wake-up does no harm.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from specserve_operator.api.conditions import EventReason
from specserve_operator.api.status import KvTransferStatus
from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.api.validation import InvalidManifest, parse_service
from specserve_operator.cluster.protocol import SEED_FIELD_MANAGER, ApplyOutcome, Cluster, ClusterError
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.events import transition_events
from specserve_operator.core.invalid import invalid_event, invalid_status
from specserve_operator.core.measurements import stored_kv_transfer, without_measurements
from specserve_operator.core.objects import ApplyFailure, Event, EventType, Manifest, ObjectRef, ServiceKey
from specserve_operator.core.plan import plan
from specserve_operator.core.scalers import compute_scaler_statuses
from specserve_operator.core.snapshot import build_snapshot
from specserve_operator.core.stats import PodStats, TransferTotals
from specserve_operator.core.status import compute_status
from specserve_operator.render import render, render_seeds
from specserve_operator.runtime.clock import Clock, sleep
from specserve_operator.runtime.workqueue import Backoff, QueueShutDown, WorkQueue

_LOG = logging.getLogger(__name__)

_WORKLOAD = "Deployment"
# When a kind is applied, 0 if it is not among these. What is referred to comes first: a RoleBinding's Role, which the
# API server looks up, and all that pods refer to.
_STAGES = {"RoleBinding": 1, _WORKLOAD: 2}


class StatsSource(Protocol):
    """Where the latest statistics of pods come from, e.g. `runtime.collector.StatsCollector`."""

    def pod_stats(self, key: ServiceKey) -> Mapping[str, PodStats]:
        """By pod uid; empty where nothing is known."""
        ...

    def kv_transfer(self, key: ServiceKey, service_uid: str) -> TransferTotals:
        """The sum over all pods of this very service that have been heard of: it never shrinks."""
        ...

    def has_asked(self, key: ServiceKey) -> bool:
        """Whether the service's pods were asked since the start, and had time to answer."""
        ...

    def hasten(self) -> None:
        """Called after something was applied that pods may want to know at once."""
        ...

    async def run(self, *, wake: Callable[[ServiceKey], None]) -> None:
        """Keeps the statistics fresh until it is cancelled; calls `wake` with services whose statistics changed."""
        ...


@dataclass(frozen=True, slots=True)
class ReconcilerOptions:
    """`resync_seconds`: how often every service is looked at though nothing is known to have changed.

    `refused_retry_seconds`: how long to wait after what a repetition alone will hardly cure (a missing permission).
    `drain_seconds`: how long workers may take to finish their step at the end.
    `measurement_seconds`, `measurements_per_second`: how often a status is written in which only measured numbers
    differ, at most, and how many of all services' are: with more services they wait in line.
    """

    workers: int = 4
    resync_seconds: float = 300.0
    refused_retry_seconds: float = 60.0
    drain_seconds: float = 10.0
    measurement_seconds: float = 10.0
    measurements_per_second: float = 5.0
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
        # When a service's status was written last.
        self._written_at: dict[ServiceKey, float] = {}
        # When the status of a service with newer numbers alone may be written; and the last of those times.
        self._turns: dict[ServiceKey, float] = {}
        self._last_turn = float("-inf")
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
            # The cluster removes the children, which are owned by the service.
            for known in (self._written_at, self._turns, self._found):
                known.pop(key, None)
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
            are_pods_asked=self._stats.has_asked(key),
            crd_problem=self.crd_problem,
        )
        plan_ = plan(snapshot)
        unsown = await self._sow(render_seeds(plan_))
        refused = await self._apply(render(plan_)) | unsown
        failures = list(refused.values())
        # What comes in the place of old pods is a workload; anything else that is refused is no reason to keep them.
        if not any(ref.kind == _WORKLOAD for ref in refused):
            failures += await self._delete(plan_.deletions)
        status = compute_status(snapshot, plan_, [ApplyFailure(ref, str(error)) for ref, error in refused.items()])
        for ref, scaler_status in compute_scaler_statuses(snapshot, plan_).items():
            if ref not in refused:
                await self._cluster.patch_child_status(ref, scaler_status)
        previous = manifest.get("status") or {}
        wait_seconds = self._held_back_seconds(key, previous, status)
        if not wait_seconds:
            await self._write_status(key, previous, status)
            await self._emit(key, transition_events(previous, status, snapshot, plan_))
        await self._emit(key, (Event(EventType.WARNING, EventReason.APPLY_FAILED, str(f)) for f in failures))
        _raise_first(failures)
        waits = [seconds for seconds in (wait_seconds, plan_.requeue_after_seconds) if seconds]
        return min(waits, default=None)

    def _held_back_seconds(self, key: ServiceKey, previous: Mapping[str, Any], status: Mapping[str, Any]) -> float:
        """For how long a status has to wait, since there are only newer numbers in it; 0: it is to be written."""
        if previous == status or without_measurements(previous) != without_measurements(status):
            return 0.0
        if not self._stats.has_asked(key):
            return self._options.resync_seconds  # they are not newer, but none: the first answers wake it
        return self._measurement_due(key)

    def _measurement_due(self, key: ServiceKey) -> float:
        """In how many seconds the service's turn for newer numbers comes; 0 if it has come.

        Turns are given out one after the other, so that many that become due at once cause no burst of writes. A turn
        that is to come is kept over writes for other reasons: so no service ever holds more than one.
        """
        now = self._clock.time()
        if key not in self._turns:
            self._last_turn = max(self._last_turn + 1 / self._options.measurements_per_second, now)
            self._turns[key] = self._last_turn
        earliest = self._written_at.get(key, float("-inf")) + self._options.measurement_seconds
        return max(self._turns[key] - now, earliest - now, 0.0)

    def _on_statistics(self, key: ServiceKey) -> None:
        """The statistics of a service have changed: it gets a look when its turn has come."""
        due = self._measurement_due(key)
        if due:
            self.queue.add_after(key, due)
        else:
            self.queue.add(key)

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

    async def _apply(self, rendered: Iterable[Manifest]) -> dict[ObjectRef, ClusterError]:
        """Applies everything, stage by stage; the objects of one stage concurrently.

        Returns what could not be applied, which keeps nothing else from it.
        """
        refused, outcomes = dict[ObjectRef, ClusterError](), set[ApplyOutcome]()

        async def apply(obj: Manifest) -> None:
            try:
                outcomes.add(await self._cluster.apply(obj))
            except ClusterError as error:
                refused[ObjectRef.of(obj)] = error

        for _, stage in groupby(sorted(rendered, key=_stage_of), key=_stage_of):
            async with asyncio.TaskGroup() as group:
                for obj in stage:
                    group.create_task(apply(obj))
        if outcomes - {ApplyOutcome.UNCHANGED}:
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

    async def _write_status(self, key: ServiceKey, previous: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
        """Returns whether there was anything to write."""
        if self._turns.get(key, float("inf")) <= self._clock.time():
            del self._turns[key]
        if status == previous:
            return False
        await self._cluster.patch_status(key, status)
        self._written_at[key] = self._clock.time()
        return True

    async def _emit(self, key: ServiceKey, events: Iterable[Event]) -> None:
        """Records events. They are news, not state: one that is refused is no reason to do a step again."""
        for event in events:
            try:
                await self._cluster.emit(key, event)
            except ClusterError as error:
                _LOG.warning("%s: the event %s was not recorded: %s", key, event.reason, error)

    async def _report_invalid(self, key: ServiceKey, manifest: Manifest, message: str) -> None:
        """A spec that cannot even be read. What runs keeps running; only a new generation can help."""
        previous = manifest.get("status") or {}
        generation = int(manifest["metadata"].get("generation", 0))
        status = invalid_status(previous, message, generation=generation, now=self._clock.utc_now())
        if await self._write_status(key, previous, status):
            await self._emit(key, [invalid_event(message)])

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set; then workers finish the step they are in. An unforeseen error ends it all."""
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._work(), name=f"reconcile-{i}") for i in range(self._options.workers)]
            feeders = [
                group.create_task(self._feed(), name="watch"),
                group.create_task(self._resync(), name="resync"),
            ]
            feeders.append(group.create_task(self._stats.run(wake=self._on_statistics), name="statistics"))
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
        """Adds every service at once, and then from time to time again, spread out so that they do not come at once."""
        spread_seconds = 0.0
        while True:
            try:
                for key in await self._cluster.list_services():
                    self.queue.add_after(key, random.uniform(0, spread_seconds))
            except ClusterError as error:
                _LOG.warning("services were not listed: %s", error)
            await sleep(self._clock, self._options.resync_seconds)
            spread_seconds = self._options.resync_seconds / 2

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
            # A step that changes nothing never waits: a thousand of them in a row would keep all others from running.
            await asyncio.sleep(0)

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


def _stage_of(obj: Manifest) -> int:
    return _STAGES.get(obj["kind"], 0)


def _raise_first(failures: Sequence[ClusterError]) -> None:
    """Raises the first failure, with the number of the others; one that a repetition may cure, if one of them is."""
    if len(failures) == 1:
        raise failures[0]
    if failures:
        is_retryable = any(failure.retryable for failure in failures)
        raise ClusterError(f"{failures[0]} (and {len(failures) - 1} more)", retryable=is_retryable) from failures[0]
