"""Asks every ready serving pod for its statistics, and brings it newer settings.

Nothing here is needed for serving: pods read their settings from a mounted file, and a service whose pods do
not answer shows no measurements. So a pod that fails to answer costs one log line and is asked again.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from specserve_operator.cluster.protocol import Cluster, ClusterError
from specserve_operator.constants import LABEL_POOL, LABEL_REVISION, RUNTIME_FILE
from specserve_operator.core.names import Pool, runtime_config_name
from specserve_operator.core.objects import Manifest, ServiceKey
from specserve_operator.core.stats import NO_TRANSFERS, KvTransferStats, PodStats, TransferTotals
from specserve_operator.identity.pods import certified_revisions
from specserve_operator.runtime.clock import Clock, sleep
from specserve_operator.runtime.control_channels import ControlChannels, PodUnreachableError
from specserve_operator.runtime.history import PodHistory
from specserve_operator.runtime.wire import (
    DesiredSpeculation,
    UnknownSettingError,
    parse_state_file,
    pod_stats,
    settings_request,
)

_LOG = logging.getLogger(__name__)
# A pod's turn may come a little late; two missed turns are silence.
_STALE_ROUNDS = 2.5
# How much of what was missed is caught up on.
_LATE_SECONDS = 1.0
_SERVING_POOLS = frozenset({Pool.PREFILL, Pool.DECODE})


@dataclass(frozen=True, slots=True)
class CollectorOptions:
    """How pods are asked.

    `period_seconds`: how often each one is, while `max_calls_per_second` in all allow it. With more pods than that a
    round takes longer: services get their turn one after the other, without waiting for each other's answers.
    `kept_channels`: to so many pods connections are kept open, which takes 100 KB each; to the others each is closed
    after its call. A new one takes five times the processor of a call: `max_connections_per_second`. Services with pods
    that were never asked come first, and as fast as calls may.
    `stale_seconds`: how long the last answer of a pod that answers no more is still given out, at least; and always for
    two and a half rounds.
    """

    period_seconds: float = 2.0
    timeout_seconds: float = 2.0
    max_concurrent_calls: int = 64
    max_calls_per_second: float = 60.0
    max_connections_per_second: float = 25.0
    kept_channels: int = 512
    window_seconds: float = 300.0
    stale_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class _Target:
    """A pod to ask. `is_certified`: it answers to nobody without a certificate, and has one of its own to show."""

    name: str
    uid: str
    ip: str
    pool: str
    is_certified: bool

    @property
    def certified_uid(self) -> str | None:
        return self.uid if self.is_certified else None


@dataclass(frozen=True, slots=True)
class _Service:
    """What there is of one service: pods to ask, all pods that exist, and what they are to run with."""

    uid: str
    targets: tuple[_Target, ...]
    pod_uids: frozenset[str]
    desired: DesiredSpeculation | None


@dataclass(slots=True)
class _Pod:
    """What is remembered of one pod."""

    history: PodHistory
    stats: PodStats | None = None
    inherited: KvTransferStats = NO_TRANSFERS
    answered_at: float = 0.0
    is_silent: bool = False

    @property
    def kv_transfer(self) -> TransferTotals:
        return TransferTotals() if self.stats is None else TransferTotals(self.stats.kv_transfer, self.inherited)


@dataclass(slots=True)
class _Known:
    """What is remembered of one service. `gone`: what its former pods moved; sums must not shrink with them."""

    service_uid: str
    pods: dict[str, _Pod] = field(default_factory=dict)
    gone: TransferTotals = field(default_factory=TransferTotals)


class StatsCollector:
    """The latest statistics of every service.

    `wake` is called with a service whose pods were asked for the first time, or whose statistics have changed.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Clock,
        options: CollectorOptions | None = None,
        channels: ControlChannels | None = None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._options = options or CollectorOptions()
        self._channels = channels or ControlChannels()
        self._calls = asyncio.Semaphore(self._options.max_concurrent_calls)
        self._known: dict[ServiceKey, _Known] = {}
        self._shown: dict[ServiceKey, dict[str, PodStats]] = {}
        self._looked: dict[ServiceKey, tuple[int, _Service]] = {}
        self._asked: set[ServiceKey] = set()
        self._round_seconds = self._options.period_seconds
        self._started_at = clock.time()
        self._hasten = asyncio.Event()

    def pod_stats(self, key: ServiceKey) -> Mapping[str, PodStats]:
        """Statistics by pod uid, of the pods that answered lately."""
        oldest = self._clock.time() - max(self._options.stale_seconds, _STALE_ROUNDS * self._round_seconds)
        pods = self._known[key].pods if key in self._known else {}
        return {uid: p.stats for uid, p in pods.items() if p.stats is not None and p.answered_at >= oldest}

    def kv_transfer(self, key: ServiceKey, service_uid: str) -> TransferTotals:
        """The sum over every pod that has ever answered, those that are silent or gone included: it never shrinks.

        Zeros for a service that was made anew under the same name, until its own pods answer.
        """
        known = self._known.get(key)
        if known is None or known.service_uid != service_uid:
            return TransferTotals()
        total = known.gone
        for pod in known.pods.values():
            total = total.merge(pod.kv_transfer)
        return total

    def has_asked(self, key: ServiceKey) -> bool:
        """Whether the service had its turn since the start: all its pods that are ready were asked."""
        return key in self._asked

    def hasten(self) -> None:
        """Begins the next round when this one is over, rather than after a pause: settings have changed."""
        self._hasten.set()

    async def run(self, *, wake: Callable[[ServiceKey], None]) -> None:
        """Polls until it is cancelled."""
        try:
            while True:
                self._hasten.clear()
                began = self._clock.time()
                await self._round(wake)
                took = self._clock.time() - began
                self._round_seconds = max(took, self._options.period_seconds)
                await self._pause(self._options.period_seconds - took)
        finally:
            await self._channels.close()

    async def poll(self) -> list[ServiceKey]:
        """Asks every pod once. Returns the services whose statistics are not what they were."""
        changed: list[ServiceKey] = []
        await self._round(changed.append)
        return changed

    async def _round(self, wake: Callable[[ServiceKey], None]) -> None:
        """Asks every pod once; wakes each service whose statistics are not what they were."""
        try:
            keys = await self._cluster.list_services()
            services = {key: service for key in keys if (service := await self._look(key)) is not None}
        except ClusterError as error:
            _LOG.warning("statistics were not collected: %s", error)
            return
        self._forget_all_but(services)
        addresses = {target.ip for service in services.values() for target in service.targets}
        kept = frozenset(sorted(addresses)[: self._options.kept_channels])
        await self._channels.keep_only(kept)
        new = {key for key, service in services.items() if self._has_new(key, service)}
        turns = {key: self._turn_seconds(service, kept, is_new=key in new) for key, service in services.items()}
        # A round that is becoming longer must not make the pods at its end look silent.
        shortest_seconds = sum(turns.values())
        self._round_seconds = max(self._round_seconds, shortest_seconds)
        is_paced = shortest_seconds > self._options.period_seconds
        due = self._clock.time()
        async with asyncio.TaskGroup() as group:
            for key in sorted(services, key=lambda key: key not in new):
                group.create_task(self._take_turn(key, services[key], wake, kept=kept))
                if is_paced:
                    # By the clock, so that turns which come late, as in a busy start, make no round longer.
                    now = self._clock.time()
                    due = max(due, now - _LATE_SECONDS) + turns[key]
                    await sleep(self._clock, max(due - now, 0.0))

    def _has_new(self, key: ServiceKey, service: _Service) -> bool:
        """Whether a pod was never asked."""
        return any(target.uid not in self._known[key].pods for target in service.targets)

    def _turn_seconds(self, service: _Service, kept: Container[str], *, is_new: bool) -> float:
        """How long the next service has to wait."""
        call_seconds = 1 / self._options.max_calls_per_second
        connection_seconds = max(1 / self._options.max_connections_per_second, call_seconds)
        return sum(call_seconds if is_new or t.ip in kept else connection_seconds for t in service.targets)

    async def _take_turn(
        self, key: ServiceKey, service: _Service, wake: Callable[[ServiceKey], None], *, kept: Container[str]
    ) -> None:
        await self._ask_all(key, service)
        is_first = key not in self._asked
        self._asked.add(key)
        if self._has_changed(key) or is_first:
            wake(key)
        await self._channels.drop(target.ip for target in service.targets if target.ip not in kept)

    async def _ask_all(self, key: ServiceKey, service: _Service) -> None:
        await asyncio.gather(*(self._ask(key, target, service.desired) for target in service.targets))

    def _has_changed(self, key: ServiceKey) -> bool:
        """Whether the statistics are not what they were at the last call."""
        before, now = self._shown.get(key, {}), _shown(self.pod_stats(key))
        self._shown[key] = now
        return now != before

    async def _look(self, key: ServiceKey) -> _Service | None:
        """None if it is gone by now. What has not changed is not read again."""
        changes = self._cluster.changes(key)
        if key in self._looked and self._looked[key][0] == changes:
            return self._looked[key][1]
        manifest = await self._cluster.get_service(key)
        if manifest is None:
            return None
        meta = manifest["metadata"]
        owned = await self._cluster.list_owned(key)
        pods = [obj for obj in owned if obj["kind"] == "Pod" and not _is_leftover(obj["metadata"], meta)]
        service = _Service(
            uid=meta.get("uid", ""),
            targets=tuple(_serving_pods(pods, certified_revisions(owned))),
            pod_uids=frozenset(pod["metadata"].get("uid", "") for pod in pods),
            desired=_desired_speculation(owned, key),
        )
        self._looked[key] = (changes, service)
        await asyncio.sleep(0)  # when all are new, thousands are read in a row
        return service

    def _forget_all_but(self, services: Mapping[ServiceKey, _Service]) -> None:
        """Drops services and pods that are gone; a pod that is only not ready keeps its history."""
        for known_keys in (self._known, self._shown, self._looked):
            for key in known_keys.keys() - services.keys():
                del known_keys[key]
        self._asked &= services.keys()
        for key, service in services.items():
            known = self._known.get(key)
            if known is None or known.service_uid != service.uid:
                known = self._known[key] = _Known(service.uid)
                self._asked.discard(key)
            for uid in known.pods.keys() - service.pod_uids:
                known.gone = known.gone.merge(known.pods.pop(uid).kv_transfer)

    async def _ask(self, key: ServiceKey, target: _Target, desired: DesiredSpeculation | None) -> None:
        pod = self._known[key].pods.setdefault(
            target.uid, _Pod(PodHistory(window_seconds=self._options.window_seconds))
        )
        try:
            async with self._calls:
                answer = await self._channels.get_stats(
                    target.ip, timeout_seconds=self._options.timeout_seconds, certified_uid=target.certified_uid
                )
                stats = pod_stats(answer)
                if stats.pod_uid not in ("", target.uid):
                    return  # the address belongs to another pod by now
                if desired is not None and _is_behind(stats, desired, target):
                    await self._push(target, desired)
        except (PodUnreachableError, ValueError) as error:
            if not pod.is_silent:
                _LOG.warning("pod %s gives no statistics: %s", target.name, error)
            pod.is_silent = True
            return
        pod.is_silent = False
        pod.answered_at = self._clock.time()
        own = replace(stats, pod_name=target.name, pod_uid=target.uid)
        if pod.stats is None and own.uptime_seconds > self._clock.time() - self._started_at:
            pod.inherited = own.kv_transfer
        pod.stats = pod.history.add(own, self._clock.time())

    async def _push(self, target: _Target, desired: DesiredSpeculation) -> None:
        try:
            request = settings_request(desired)
        except UnknownSettingError as error:
            _LOG.warning("pod %s: %s; it reads the setting from its file", target.name, error)
            return
        await self._channels.set_speculation(
            target.ip,
            request,
            timeout_seconds=self._options.timeout_seconds,
            certified_uid=target.certified_uid,
        )

    async def _pause(self, seconds: float) -> None:
        """Until the time is over, or `hasten`."""
        waits = [
            asyncio.ensure_future(sleep(self._clock, seconds)),
            asyncio.ensure_future(self._hasten.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _is_leftover(pod: Manifest, service: Manifest) -> bool:
    """By the metadata of both: True for a pod of an older service of the same name. It has the label while it ends."""
    created, service_created = pod.get("creationTimestamp"), service.get("creationTimestamp")
    if not (pod.get("deletionTimestamp") and created and service_created):
        return False  # an older pod that goes on was handed over to the new service
    return datetime.fromisoformat(created) < datetime.fromisoformat(service_created)


def _serving_pods(pods: Iterable[Manifest], certified: Container[tuple[str, str]]) -> Iterable[_Target]:
    """Ready prefill and decode pods with an address. `certified`: pools and revisions whose pods have certificates."""
    for pod in pods:
        meta, status = pod["metadata"], pod.get("status") or {}
        labels = meta.get("labels") or {}
        pool, revision = labels.get(LABEL_POOL, ""), labels.get(LABEL_REVISION, "")
        if pool not in _SERVING_POOLS or not status.get("podIP"):
            continue
        conditions = status.get("conditions") or ()
        if any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions):
            yield _Target(
                name=meta["name"],
                uid=meta.get("uid", ""),
                ip=status["podIP"],
                pool=pool,
                is_certified=(pool, revision) in certified,
            )


def _desired_speculation(owned: Iterable[Manifest], key: ServiceKey) -> DesiredSpeculation | None:
    """What the run-time ConfigMap asks for; None where there is none yet."""
    name = runtime_config_name(key.name)
    for obj in owned:
        if obj["kind"] == "ConfigMap" and obj["metadata"]["name"] == name:
            try:
                return parse_state_file((obj.get("data") or {}).get(RUNTIME_FILE, ""))
            except ValueError as error:
                _LOG.warning("ConfigMap %s/%s: %s", key.namespace, name, error)
    return None


def _is_behind(stats: PodStats, desired: DesiredSpeculation, target: _Target) -> bool:
    return target.pool == Pool.DECODE and stats.speculation.generation < desired.generation


def _shown(stats: Mapping[str, PodStats]) -> dict[str, PodStats]:
    """The statistics without what changes though nothing happens."""
    return {uid: replace(pod, uptime_seconds=0.0) for uid, pod in stats.items()}
