"""A cluster in which pods take their time: to be placed, to start, and to drain, on nodes that may be full."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import Plan
from tests.unit.core.builders import FakeCluster, make_pod, pods_of

TICK_SECONDS = 10
MAX_TICKS = 400


@dataclass
class Pod:
    """`ticks_to_start`: until it is ready, from when it has a node on. `ticks_to_drain`: None while it is wanted."""

    number: int
    deployment: Manifest
    ticks_to_start: int
    created: datetime
    has_node: bool = False
    ticks_to_drain: int | None = None
    ready_since: datetime | None = None
    pauses: bool = False

    @property
    def name(self) -> str:
        return str(self.deployment["metadata"]["name"])

    @property
    def is_ready(self) -> bool:
        return self.has_node and self.ticks_to_start == 0 and self.ticks_to_drain is None and not self.pauses


class World(FakeCluster):
    """`capacity`: how many pods have room, those that drain included; None: any number.

    Pods whose Deployment is in `broken` never get ready; of those in `brittle`, they are down a tick later. Of those in
    `flapping`, the two oldest are ready every other time for two ticks.
    """

    def __init__(self, *, capacity: int | None = None, start_ticks: int = 1, drain_ticks: int = 1) -> None:
        super().__init__()
        self.capacity, self.start_ticks, self.drain_ticks = capacity, start_ticks, drain_ticks
        self.broken: set[str] = set()
        self.brittle: set[str] = set()
        self.flapping: set[str] = set()
        self._ticks = 0
        self._made = 0
        self._living: list[Pod] = []

    def _scale(self) -> None:
        """As ReplicaSets do: what is not ready goes first, then what is newest."""
        wanted = {name: obj for (kind, name), obj in self.objects.items() if kind == "Deployment"}
        for name in {p.name for p in self._living} | wanted.keys():
            replicas = wanted[name]["spec"]["replicas"] if name in wanted else 0
            active = [p for p in self._living if p.name == name and p.ticks_to_drain is None]
            by_worth = sorted(active, key=lambda p: (not p.is_ready, p.number))
            for pod in by_worth[replicas:]:
                pod.ticks_to_drain = self.drain_ticks
            for _ in range(replicas - len(active)):
                self._made += 1
                self._living.append(Pod(self._made, wanted[name], self.start_ticks, self.now))

    def tick(self) -> None:
        """Some time passes."""
        self.now += timedelta(seconds=TICK_SECONDS)
        for pod in self._living:
            if pod.ticks_to_drain is not None:
                pod.ticks_to_drain -= 1
        self._living = [p for p in self._living if p.ticks_to_drain is None or p.ticks_to_drain > 0]
        for pod in self._living:
            if pod.has_node:
                if pod.name in self.brittle and pod.is_ready:
                    pod.ticks_to_start = self.start_ticks
                elif pod.name not in self.broken and pod.ticks_to_start:
                    pod.ticks_to_start -= 1
                    pod.ready_since = self.now
            elif self.capacity is None or sum(p.has_node for p in self._living) < self.capacity:
                pod.has_node = True

        self._ticks += 1
        self._flap()

    def _flap(self) -> None:
        for name in self.flapping:
            for pod in sorted((p for p in self._living if p.name == name), key=lambda p: p.number)[:2]:
                if self._ticks % 4 == 0:
                    pod.ready_since = self.now
                pod.pauses = self._ticks % 4 >= 2

    def fail_pod(self, pool: str, index: int) -> None:
        """A ready pod stops serving, for good."""
        ready = [p for p in self._living if p.is_ready and p.deployment in self._deployments(pool)]
        if ready:
            ready[index % len(ready)].ticks_to_start = 10**6

    def repair(self) -> None:
        """Pods that have stopped serving begin again."""
        for pod in self._living:
            pod.ticks_to_start = min(pod.ticks_to_start, self.start_ticks)

    def _deployments(self, pool: str) -> list[Manifest]:
        return [obj for obj in self.objects.values() if obj["metadata"]["labels"].get("specserve.dev/pool") == pool]

    def reconcile(self, service: SpeculativeService, *, dies_after: int | None = None) -> Plan:
        """One pass of an operator that has just been started; it may die after some writes."""
        plan_ = self.plan(service)
        self.apply(plan_, at_most=dies_after)
        return plan_

    def settle(self, service: SpeculativeService) -> None:
        """Lets time pass until nothing changes any more. Raises AssertionError if that takes too long."""
        calm = 0
        for _ in range(MAX_TICKS):
            before = self._state()
            self.reconcile(service)
            self.tick()
            calm = calm + 1 if self._state() == before else 0
            if calm > self.start_ticks + self.drain_ticks + 1:
                return
        raise AssertionError(f"not at rest after {MAX_TICKS} ticks")

    def _state(self) -> list[tuple[str, int, bool]]:
        return sorted((p.name, p.number, p.is_ready) for p in self._living) + sorted(
            (name, obj["spec"]["replicas"], True) for (kind, name), obj in self.objects.items() if kind == "Deployment"
        )

    def ready(self, pool: str, *, without: Collection[str] = ()) -> int:
        """Ready pods but those of the Deployments in `without`."""
        return sum(p.is_ready and p.name not in without for p in self._of(pool))

    def active(self, pool: str) -> int:
        """Pods that are not on their way out."""
        return sum(p.ticks_to_drain is None for p in self._of(pool))

    def names(self, pool: str) -> set[str]:
        """Of the pool's Deployments."""
        return {str(obj["metadata"]["name"]) for obj in self._deployments(pool) if obj["kind"] == "Deployment"}

    def _of(self, pool: str) -> list[Pod]:
        labels = ((p, p.deployment["metadata"]["labels"]) for p in self._living)
        return [p for p, found in labels if found["specserve.dev/pool"] == pool]

    def children(self) -> list[Manifest]:
        return [*self.objects.values(), *(self._manifest(p) for p in self._living)]

    def pods(self, pool: str) -> list[Manifest]:
        return pods_of(self.children(), pool)

    def _manifest(self, pod: Pod) -> Manifest:
        return make_pod(
            pod.deployment,
            pod.number,
            ready=pod.is_ready,
            created=pod.created,
            ready_since=pod.ready_since,
            container={"started": True} if pod.pauses else None,
            unschedulable="" if pod.has_node else "0/1 nodes are available: 1 Insufficient nvidia.com/gpu",
            deleting=pod.ticks_to_drain is not None,
        )
