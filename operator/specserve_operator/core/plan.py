"""What is to be: from a snapshot to the workloads, their replicas, and what is no longer needed. Values only.

problems      the spec cannot be served: nothing is rendered and nothing deleted, what runs keeps running
pools         for each pool the current revision, how many replicas it gets next, and what old revisions keep
deletions     pools that left the spec, old revisions without pods, headless Services nobody resolves any more
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from specserve_operator.api.pools import ScalingMode, ServingPool
from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.constants import LABEL_POOL, LABEL_TARGET_REVISION
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.launch import (
    EngineLaunch,
    GatewayLaunch,
    engine_launch,
    gateway_launch,
    serving_pool,
)
from specserve_operator.core.names import Pool, workload_name
from specserve_operator.core.objects import Manifest, ObjectRef
from specserve_operator.core.problems import find_problems
from specserve_operator.core.progress import deadline_seconds
from specserve_operator.core.revision import pool_revision
from specserve_operator.core.rollout import Bounds, Pairing, Replicas, Step, next_step, pair
from specserve_operator.core.runtime_state import RuntimeState, plan_runtime_state
from specserve_operator.core.snapshot import Snapshot, WorkloadView

# A pool of fewer pods has no disruption budget: it would only keep nodes from being drained.
MIN_REPLICAS_FOR_BUDGET = 2

Launch = EngineLaunch | GatewayLaunch


@dataclass(frozen=True, slots=True)
class CurrentWorkload:
    """The workload of a pool's wanted revision. `pool_replicas`: what the pool gets over all revisions."""

    pool: Pool
    revision: str
    replicas: int
    pool_replicas: int
    launch: Launch

    @property
    def name(self) -> str:
        return workload_name(self.launch.service, self.pool, self.revision)

    @property
    def target_revision(self) -> str | None:
        return self.launch.target_revision if isinstance(self.launch, EngineLaunch) else None


@dataclass(frozen=True, slots=True)
class OldWorkload:
    """A workload of a former revision with what it is to have next. Its launch is forgotten: `live` is all there is."""

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
class Plan:
    """All that `render` needs. `requeue_after_seconds`: when to look again though nothing may have changed."""

    service: SpeculativeService
    config: OperatorConfig
    runtime_state: RuntimeState
    problems: tuple[str, ...] = ()
    pools: tuple[PoolPlan, ...] = ()
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
    runtime_state = plan_runtime_state(service)
    problems = find_problems(service, config)
    if problems:
        return Plan(service, config, runtime_state, problems=problems)
    launches = plan_launches(snapshot)
    pools = plan_rollouts(snapshot, launches)
    return Plan(
        service,
        config,
        runtime_state,
        pools=pools,
        deletions=tuple(plan_deletions(snapshot, pools)),
        requeue_after_seconds=_seconds_to_deadline(snapshot, pools),
    )


def plan_launches(snapshot: Snapshot) -> Mapping[Pool, Launch]:
    """What the pods of each pool are started with, in the order in which pools are applied."""
    service, config = snapshot.service, snapshot.config
    launches: dict[Pool, Launch] = {}
    if service.spec.prefill is not None:
        launches[Pool.PREFILL] = engine_launch(service, Pool.PREFILL, config=config)
    launches[Pool.DECODE] = _decode_launch(snapshot)
    launches[Pool.GATEWAY] = gateway_launch(service, config=config)
    return launches


def _decode_launch(snapshot: Snapshot) -> EngineLaunch:
    """The decode pods' launch, with the drafter as large as the live one where that is enough.

    A lower `length.max` is a run-time change: a workload that differs in nothing else is kept. Of several such
    workloads the one with most replicas is, so that a rollout between them does not turn around half-way.
    """
    service, config = snapshot.service, snapshot.config
    wanted = engine_launch(service, Pool.DECODE, config=config)
    if wanted.draft is None:
        return wanted
    live = sorted(
        (w for w in snapshot.pool_workloads(Pool.DECODE) if (w.max_draft_tokens or 0) >= wanted.draft.max_tokens),
        key=lambda w: (-w.replicas, w.max_draft_tokens),
    )
    for workload in live:
        launch = engine_launch(service, Pool.DECODE, config=config, max_draft_tokens=workload.max_draft_tokens)
        if pool_revision(launch) == workload.revision:
            return launch
    return wanted


def plan_replicas(serving: ServingPool, workloads: Iterable[WorkloadView]) -> int:
    """How many replicas a serving pool is to have.

    The number that the operator last decided is on the pool's workloads, so that a running rollout's surge is not
    taken for it. The last of `workloads` has it: an old one is no longer told of later decisions.
    """
    if serving.scaling is None:
        return 1 if serving.replicas is None else serving.replicas
    if serving.scaling.min_replicas == serving.scaling.max_replicas:
        return serving.scaling.min_replicas
    decided = [w.pool_replicas if w.pool_replicas is not None else w.replicas for w in workloads]
    current = decided[-1] if decided else serving.scaling.min_replicas
    if serving.scaling.mode is not ScalingMode.AUTO:
        return current  # somebody else's decision, or nobody's
    return min(max(current, serving.scaling.min_replicas), serving.scaling.max_replicas)


def plan_rollouts(snapshot: Snapshot, launches: Mapping[Pool, Launch]) -> tuple[PoolPlan, ...]:
    """The next step of every pool, prefill and decode in step with each other."""
    desired = {pool: _desired_replicas(snapshot, pool, launch) for pool, launch in launches.items()}
    pairing = _pairing(snapshot, launches, desired)
    return tuple(
        _plan_pool(snapshot, pool, launch, desired=desired[pool], pairing=pairing) for pool, launch in launches.items()
    )


def _desired_replicas(snapshot: Snapshot, pool: Pool, launch: Launch) -> int:
    if pool is Pool.GATEWAY:
        return snapshot.service.spec.gateway.replicas
    revision = pool_revision(launch)
    workloads = sorted(snapshot.pool_workloads(pool), key=lambda w: w.revision == revision)
    return plan_replicas(serving_pool(snapshot.service, pool), workloads)


def _plan_pool(snapshot: Snapshot, pool: Pool, launch: Launch, *, desired: int, pairing: Pairing) -> PoolPlan:
    revision = pool_revision(launch)
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
        current=CurrentWorkload(pool, revision, step.current, desired, launch),
        old=tuple(
            OldWorkload(w.manifest, w.revision, live_replicas=w.replicas, replicas=replicas)
            for w, replicas in zip(old, step.old, strict=True)
        ),
    )


def _pairing(snapshot: Snapshot, launches: Mapping[Pool, Launch], desired: Mapping[Pool, int]) -> Pairing:
    decode = launches[Pool.DECODE]
    if Pool.PREFILL not in launches or not isinstance(decode, EngineLaunch):
        return Pairing()
    return pair(
        prefill_desired=desired[Pool.PREFILL],
        prefill_ready=_count_serving(snapshot, Pool.PREFILL, decode.target_revision, same=True),
        decode_desired=desired[Pool.DECODE],
        old_decode_ready=_count_serving(snapshot, Pool.DECODE, decode.target_revision, same=False),
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
    return Replicas(
        wanted=wanted,
        ready=sum(p.ready for p in pods),
        paused=sum(p.started and not p.ready for p in pods),
        unplaced=max(wanted - sum(bool(p.node) for p in pods), 0),
    )


def _bounds(snapshot: Snapshot) -> Bounds:
    rollout = snapshot.service.spec.rollout
    return Bounds(max_surge=rollout.max_surge, max_unavailable=rollout.max_unavailable)


def plan_deletions(snapshot: Snapshot, pools: tuple[PoolPlan, ...]) -> Iterator[ObjectRef]:
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
    used = {w.target_revision for w in snapshot.pool_workloads(Pool.PREFILL)}
    used |= {p.current.target_revision or "" for p in pools}
    for child in snapshot.others:
        labels = child["metadata"].get("labels") or {}
        match child["kind"]:
            case "Service":  # headless ones; the gateway's has no target revision
                target = labels.get(LABEL_TARGET_REVISION)
                is_unused = target is not None and (Pool.PREFILL not in planned or target not in used)
            case "PodDisruptionBudget":
                is_unused = not _has_budget(labels.get(LABEL_POOL), pools)
            case _:
                is_unused = False
        if is_unused:
            yield ObjectRef.of(child)


def _has_budget(pool: str | None, pools: tuple[PoolPlan, ...]) -> bool:
    return any(p.pool == pool and needs_disruption_budget(p) for p in pools)


def needs_disruption_budget(pool: PoolPlan) -> bool:
    """Serving pools that can spare a pod are protected from losing several at once."""
    return pool.pool is not Pool.GATEWAY and pool.desired >= MIN_REPLICAS_FOR_BUDGET


def _seconds_to_deadline(snapshot: Snapshot, pools: tuple[PoolPlan, ...]) -> float | None:
    """When the first running rollout would count as stalled."""
    waits = [
        deadline_seconds(snapshot, p.pool)
        for p in pools
        if p.old or p.current.replicas < p.desired or _observed_ready(snapshot, p) < p.desired
    ]
    # A second later than the deadline, so that it has passed for certain; never in a busy loop once it has.
    return min((wait + 1 for wait in waits if wait > 0), default=None)


def _observed_ready(snapshot: Snapshot, pool: PoolPlan) -> int:
    pods = snapshot.pool_pods(pool.pool, revision=pool.current.revision)
    return sum(p.is_serving for p in pods)
