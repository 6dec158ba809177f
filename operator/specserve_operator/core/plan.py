"""What is to be: from a snapshot to the workloads, their replicas, and what is no longer needed. Values only.

problems      the spec cannot be served: nothing is rendered and nothing deleted, what runs keeps running
resolution    what the pods of each pool are: kept as they were resolved once, or resolved now (core/pinning.py)
pools         for each pool the current revision, how many replicas it gets next, and what old revisions keep
scalers       for each pool whose size others choose, the object in which they do
deletions     pools that left the spec, old revisions without pods, and other children that nothing needs any more
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from specserve_operator.api.pools import ScalingMode, ServingPool
from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.constants import LABEL_POOL, LABEL_TARGET_REVISION
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.launch import serving_pool
from specserve_operator.core.names import Pool, workload_name
from specserve_operator.core.objects import Manifest, ObjectRef
from specserve_operator.core.pinning import Resolution, Resolved, resolve
from specserve_operator.core.problems import find_problems
from specserve_operator.core.progress import deadline_seconds
from specserve_operator.core.records import HISTORY_LIMIT
from specserve_operator.core.rollout import Bounds, Pairing, Replicas, Step, next_step, pair
from specserve_operator.core.runtime_state import RuntimeState, plan_runtime_state
from specserve_operator.core.snapshot import Snapshot, WorkloadView

# A pool of fewer pods has no disruption budget: it would only keep nodes from being drained.
MIN_REPLICAS_FOR_BUDGET = 2


@dataclass(frozen=True, slots=True)
class CurrentWorkload:
    """The workload of a pool's wanted revision. `pool_replicas`: what the pool gets over all revisions."""

    service: str
    resolved: Resolved
    replicas: int
    pool_replicas: int

    @property
    def pool(self) -> Pool:
        return self.resolved.pool

    @property
    def revision(self) -> str:
        return self.resolved.revision

    @property
    def name(self) -> str:
        return workload_name(self.service, self.pool, self.revision)

    @property
    def target_revision(self) -> str | None:
        """None for a gateway."""
        return self.resolved.target_revision or None


@dataclass(frozen=True, slots=True)
class OldWorkload:
    """A workload of a former revision with what it is to have next. `live` is all that is left of it."""

    live: Manifest
    revision: str
    live_replicas: int
    replicas: int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool. `desired` replicas are wanted; `current` and `old` are the next step towards them."""

    pool: Pool
    desired: int
    current: CurrentWorkload
    old: tuple[OldWorkload, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalerPlan:
    """The PoolScaler of a pool in mode External. `seed`: what a new one starts with; None where there is one.

    `asked`: what it says, or will; `desired`: that, within the bounds of the spec.
    """

    pool: Pool
    seed: int | None
    asked: int
    desired: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that `render` needs. `requeue_after_seconds`: when to look again though nothing may have changed."""

    service: SpeculativeService
    config: OperatorConfig
    runtime_state: RuntimeState
    problems: tuple[str, ...] = ()
    resolution: Resolution | None = None
    pools: tuple[PoolPlan, ...] = ()
    scalers: tuple[ScalerPlan, ...] = ()
    deletions: tuple[ObjectRef, ...] = ()
    requeue_after_seconds: float | None = None

    def pool(self, pool: Pool) -> PoolPlan | None:
        return next((p for p in self.pools if p.pool is pool), None)

    @property
    def target_revision(self) -> str | None:
        """The target revision of the serving pools; None while the spec has problems."""
        decode = self.pool(Pool.DECODE)
        return decode.current.target_revision if decode else None


def plan(snapshot: Snapshot) -> Plan:
    """The next state of everything that belongs to the service."""
    service, config = snapshot.service, snapshot.config
    runtime_state = plan_runtime_state(
        service, snapshot.others, in_force=[s.speculation.generation for s in snapshot.pod_stats]
    )
    problems = find_problems(service, config)
    if problems:
        return Plan(service, config, runtime_state, problems=problems)
    resolution = resolve(snapshot)
    pools = plan_rollouts(snapshot, resolution)
    scalers = plan_scalers(snapshot, pools)
    return Plan(
        service,
        config,
        runtime_state,
        resolution=resolution,
        pools=pools,
        scalers=scalers,
        deletions=(*plan_deletions(snapshot, pools, scalers), *plan_forgetting(snapshot, resolution)),
        requeue_after_seconds=_seconds_to_next_look(snapshot, pools),
    )


def plan_replicas(serving: ServingPool, workloads: Iterable[WorkloadView], *, asked: int | None = None) -> int:
    """How many replicas a serving pool is to have. `asked`: what its PoolScaler says, if it has one.

    The number that the operator last decided is on the pool's workloads, so that a running rollout's surge is not
    taken for it. The last of `workloads` has it: an old one is no longer told of later decisions.
    """
    if serving.scaling is None:
        return 1 if serving.replicas is None else serving.replicas
    least, most = serving.scaling.min_replicas, serving.scaling.max_replicas
    if least == most:
        return least
    decided = [w.pool_replicas if w.pool_replicas is not None else w.replicas for w in workloads]
    current = decided[-1] if decided else least
    if serving.scaling.mode is ScalingMode.ADVISE:
        return current  # nobody's decision
    if serving.scaling.mode is ScalingMode.EXTERNAL and asked is not None:
        current = asked
    return min(max(current, least), most)


def plan_rollouts(snapshot: Snapshot, resolution: Resolution) -> tuple[PoolPlan, ...]:
    """The next step of every pool, prefill and decode in step with each other."""
    resolved = {r.pool: r for r in resolution.pools}
    desired = {pool: _desired_replicas(snapshot, r) for pool, r in resolved.items()}
    pairing = _pairing(snapshot, resolved, desired)
    return tuple(_plan_pool(snapshot, r, desired=desired[pool], pairing=pairing) for pool, r in resolved.items())


def _desired_replicas(snapshot: Snapshot, resolved: Resolved) -> int:
    pool = resolved.pool
    if pool is Pool.GATEWAY:
        return snapshot.service.spec.gateway.replicas
    workloads = sorted(snapshot.pool_workloads(pool), key=lambda w: w.revision == resolved.revision)
    scaler = snapshot.scaler(pool)
    return plan_replicas(serving_pool(snapshot.service, pool), workloads, asked=scaler.replicas if scaler else None)


def _plan_pool(snapshot: Snapshot, resolved: Resolved, *, desired: int, pairing: Pairing) -> PoolPlan:
    pool, revision = resolved.pool, resolved.revision
    workloads = snapshot.pool_workloads(pool)
    old = [w for w in workloads if w.revision != revision]
    step: Step = next_step(
        desired,
        _observed(snapshot, pool, [w for w in workloads if w.revision == revision]),
        old=[_observed(snapshot, pool, [w]) for w in old],
        bounds=_bounds(snapshot),
        limit=pairing.decode_limit if pool is Pool.DECODE else None,
        hold=pairing.prefill_hold if pool is Pool.PREFILL else 0,
    )
    return PoolPlan(
        pool=pool,
        desired=desired,
        current=CurrentWorkload(snapshot.service.metadata.name, resolved, step.current, desired),
        old=tuple(
            OldWorkload(w.manifest, w.revision, live_replicas=w.replicas, replicas=replicas)
            for w, replicas in zip(old, step.old, strict=True)
        ),
    )


def _pairing(snapshot: Snapshot, resolved: Mapping[Pool, Resolved], desired: Mapping[Pool, int]) -> Pairing:
    if Pool.PREFILL not in resolved:
        return Pairing()
    target = resolved[Pool.DECODE].target_revision
    return pair(
        prefill_desired=desired[Pool.PREFILL],
        prefill_ready=_count_serving(snapshot, Pool.PREFILL, target, same=True),
        decode_desired=desired[Pool.DECODE],
        old_decode_ready=_count_serving(snapshot, Pool.DECODE, target, same=False),
        can_surge=snapshot.service.spec.rollout.max_surge > 0,
    )


def _count_serving(snapshot: Snapshot, pool: Pool, target: str, *, same: bool) -> int:
    """Ready replicas of workloads whose target revision is (`same`) or is not `target`."""
    workloads = [w for w in snapshot.pool_workloads(pool) if (w.target_revision == target) is same]
    return sum(_observed(snapshot, pool, [w]).serving for w in workloads)


def _observed(snapshot: Snapshot, pool: Pool, workloads: list[WorkloadView]) -> Replicas:
    """The pods of one revision, which has one workload or none yet."""
    wanted = sum(w.replicas for w in workloads)
    pods = [p for w in workloads for p in snapshot.pool_pods(pool, revision=w.revision) if p.is_active]
    ready = sum(snapshot.is_available(p) for p in pods)
    return Replicas(
        wanted=wanted,
        ready=ready,
        paused=sum(p.started or p.ready for p in pods) - ready,
        unplaced=max(wanted - sum(bool(p.node) for p in pods), 0),
    )


def _bounds(snapshot: Snapshot) -> Bounds:
    rollout = snapshot.service.spec.rollout
    return Bounds(max_surge=rollout.max_surge, max_unavailable=rollout.max_unavailable)


def plan_scalers(snapshot: Snapshot, pools: tuple[PoolPlan, ...]) -> tuple[ScalerPlan, ...]:
    """A PoolScaler for every pool in mode External. A new one asks for the number that the pool has anyway."""
    scalers = []
    for pool in pools:
        if not _is_scaled_externally(snapshot.service, pool.pool):
            continue
        scaler = snapshot.scaler(pool.pool)
        asked = scaler.replicas if scaler is not None and scaler.replicas is not None else pool.desired
        scalers.append(
            ScalerPlan(pool.pool, seed=pool.desired if scaler is None else None, asked=asked, desired=pool.desired)
        )
    return tuple(scalers)


def _is_scaled_externally(service: SpeculativeService, pool: Pool) -> bool:
    scaling = None if pool is Pool.GATEWAY else serving_pool(service, pool).scaling
    return scaling is not None and scaling.mode is ScalingMode.EXTERNAL


def plan_deletions(
    snapshot: Snapshot, pools: tuple[PoolPlan, ...], scalers: tuple[ScalerPlan, ...]
) -> Iterator[ObjectRef]:
    """Children that nothing needs any more. Objects of kinds or pools that are not known here are left alone."""
    planned = {p.pool for p in pools}
    for workload in snapshot.workloads:
        if workload.pool in set(Pool) - planned:
            yield workload.ref
    for pool in pools:
        for old in pool.old:
            left = [p for p in snapshot.pool_pods(pool.pool, revision=old.revision) if not p.is_finished]
            if old.replicas == 0 and not left:
                yield ObjectRef.of(old.live)
    # By kind, the pools that have such an object.
    needed = {
        "NetworkPolicy": planned if has_network_policies(snapshot.config) else set(),
        "PodDisruptionBudget": {p.pool for p in pools if needs_disruption_budget(p)},
        "PoolScaler": {s.pool for s in scalers},
    }
    for child in snapshot.others:
        labels = child["metadata"].get("labels") or {}
        match child["kind"]:
            case "Service":  # headless ones; the gateway's has no target revision
                is_unused = LABEL_TARGET_REVISION in labels and not _has_peers(snapshot, pools, labels)
            case kind:
                is_unused = kind in needed and labels.get(LABEL_POOL) not in needed[kind]
        if is_unused:
            yield ObjectRef.of(child)


def _has_peers(snapshot: Snapshot, pools: tuple[PoolPlan, ...], labels: Mapping[str, str]) -> bool:
    """Whether the headless Service with these labels leads to prefill pods, or is going to."""
    used = {w.target_revision for w in snapshot.pool_workloads(Pool.PREFILL)}
    used |= {p.current.target_revision or "" for p in pools}
    return any(p.pool is Pool.PREFILL for p in pools) and labels[LABEL_TARGET_REVISION] in used


def plan_forgetting(snapshot: Snapshot, resolution: Resolution) -> Iterator[ObjectRef]:
    """Old records but the last few, and the last of every workload that lives. None in a pass that makes a new one."""
    if resolution.stored is None:
        return
    unrecorded = {(w.pool, w.revision) for w in snapshot.workloads}
    for age, record in enumerate(reversed(snapshot.records)):
        recorded = {(str(pool), pin.revision) for pool, pin in record.pins.items()} & unrecorded
        if age >= HISTORY_LIMIT and not recorded:
            yield record.ref
        unrecorded -= recorded


def has_network_policies(config: OperatorConfig) -> bool:
    """One machine has no network that could be divided."""
    return config.network_policies and not config.local


def needs_disruption_budget(pool: PoolPlan) -> bool:
    """Pools that can spare a pod are protected from losing several at once."""
    return pool.desired >= MIN_REPLICAS_FOR_BUDGET


def _seconds_to_next_look(snapshot: Snapshot, pools: tuple[PoolPlan, ...]) -> float | None:
    """When the first running rollout would count as stalled, or a ready pod as good enough to go on with."""
    waits = [
        deadline_seconds(snapshot, p.pool)
        for p in pools
        if p.old or p.current.replicas < p.desired or _observed_ready(snapshot, p) < p.desired
    ]
    waits += [snapshot.seconds_to_available(p) for p in snapshot.pods]
    # A second later than that, so that it has passed for certain; never in a busy loop once it has.
    return min((wait + 1 for wait in waits if wait > 0), default=None)


def _observed_ready(snapshot: Snapshot, pool: PoolPlan) -> int:
    pods = snapshot.pool_pods(pool.pool, revision=pool.current.revision)
    return sum(p.is_serving for p in pods)
