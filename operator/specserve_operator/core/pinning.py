"""What the pods of each pool are: what was resolved once, unless the user has changed it or asks for an upgrade.

For each pool there is evidence of what it was resolved to: the last record, and the live workloads. Evidence holds
while it was made from what the spec says now (`inputs`) and under the upgrade that was taken last. Where some holds,
that is what the pods are, as it was rendered then. Otherwise the pool is resolved by this operator. So a new operator,
another default image, or a record that somebody has deleted restarts nothing.

Both serving pools have one target revision: where one of them alone is resolved anew, it gets the image and the target
revision of the other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from specserve_operator.core.inputs import pool_inputs, target_inputs
from specserve_operator.core.launch import EngineLaunch, GatewayLaunch, engine_launch, gateway_launch
from specserve_operator.core.names import ANNOTATION_UPGRADE, Pool
from specserve_operator.core.objects import Manifest
from specserve_operator.core.records import PoolPin, Record
from specserve_operator.core.revision import pool_revision
from specserve_operator.core.snapshot import Snapshot

Launch = EngineLaunch | GatewayLaunch


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the pods of a pool are. Exactly one of `launch`, from which they are to be rendered, and `template` is set.

    `newer_image`: with what an upgrade would replace `image`, which may be the same; None if it would restart nothing.
    """

    pool: Pool
    inputs: str
    target_inputs: str
    revision: str
    target_revision: str
    image: str
    max_draft_tokens: int | None
    identity_server: str | None
    launch: Launch | None = None
    template: Manifest | None = None
    newer_image: str | None = None


@dataclass(frozen=True, slots=True)
class Resolution:
    """All pools in the order in which they are applied. `stored`: the record that says just this, if there is one.

    Without it, one with `number` and `upgrade` is to be made.
    """

    pools: tuple[Resolved, ...]
    number: int
    upgrade: str
    stored: Record | None


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What a pool was resolved to. `replicas`: of the workload that runs it. `record`: None if found on that workload.

    `number` is that of the record which had it last: the higher, the newer.
    """

    pin: PoolPin
    number: int
    upgrade: str
    replicas: int
    record: Record | None = None


def resolve(snapshot: Snapshot) -> Resolution:
    """Decides for every pool in the spec. Raises UnsupportedUriError, which `find_problems` would have told of."""
    upgrade = _upgrade(snapshot)
    pools = _pools_in_spec(snapshot)
    evidence = {pool: tuple(_find_evidence(snapshot, pool)) for pool in pools}
    kept = {pool: found for pool in pools if (found := _choose(snapshot, pool, evidence[pool], upgrade=upgrade))}
    _drop_unpaired(kept)
    target = _target_to_keep(snapshot, kept, evidence, upgrade=upgrade)
    resolved = []
    for pool in pools:
        found = kept.get(pool)
        one = _resolve_anew(snapshot, pool, target) if found is None else _keep(snapshot, pool, found)
        resolved.append(replace(one, newer_image=_newer_image(snapshot, one)))
    stored = _stored_as(snapshot, kept, pools, upgrade=upgrade)
    number = stored.number if stored else _next_number(snapshot, kept, pools)
    return Resolution(tuple(resolved), number=number, upgrade=upgrade, stored=stored)


def _pools_in_spec(snapshot: Snapshot) -> tuple[Pool, ...]:
    serving = (Pool.PREFILL, Pool.DECODE) if snapshot.service.spec.prefill is not None else (Pool.DECODE,)
    return (*serving, Pool.GATEWAY)


def _last_record(snapshot: Snapshot) -> Record | None:
    return snapshot.records[-1] if snapshot.records else None


def _upgrade(snapshot: Snapshot) -> str:
    """The upgrade that counts: the one that is asked for; else the one that was taken last.

    The annotation may have been removed since, which takes nothing back.
    """
    asked = snapshot.service.metadata.annotations.get(ANNOTATION_UPGRADE, "")
    taken = [(w.record, w.upgrade) for w in snapshot.workloads if w.pin is not None]
    record = _last_record(snapshot)
    if record is not None:
        taken.append((record.number, record.upgrade))
    return asked or max(taken, default=(0, ""))[1]


def _find_evidence(snapshot: Snapshot, pool: Pool) -> Iterator[_Evidence]:
    workloads = snapshot.pool_workloads(pool)
    record = _last_record(snapshot)
    if record is not None and (pin := record.pins.get(pool)) is not None:
        replicas = sum(w.replicas for w in workloads if w.revision == pin.revision)
        yield _Evidence(pin, record.number, record.upgrade, replicas, record)
    for workload in workloads:
        if workload.pin is not None:
            yield _Evidence(workload.pin, workload.record, workload.upgrade, workload.replicas)


def _choose(snapshot: Snapshot, pool: Pool, evidence: tuple[_Evidence, ...], *, upgrade: str) -> _Evidence | None:
    """The evidence that holds; None if none does.

    A lower `length.max` is a run-time change, so pods that can draft more will do. Where some were about to replace
    pods that can draft less, and those will do again, the rollout goes on or turns back, whichever is nearer.
    """
    inputs = pool_inputs(snapshot.service, pool)
    least_tokens = _max_draft_tokens(snapshot) if pool is Pool.DECODE else 0
    holding = [
        e
        for e in evidence
        if e.upgrade == upgrade and e.pin.inputs == inputs and (e.pin.max_draft_tokens or 0) >= least_tokens
    ]
    if not holding:
        return None
    newest = max(holding, key=lambda e: (e.number, e.record is not None))
    largest = max(holding, key=lambda e: (e.replicas, -(e.pin.max_draft_tokens or 0), e is newest))
    return newest if largest.pin.max_draft_tokens == newest.pin.max_draft_tokens else largest


def _max_draft_tokens(snapshot: Snapshot) -> int:
    speculation = snapshot.service.spec.speculation
    return 0 if speculation is None else speculation.length.max


def _drop_unpaired(kept: dict[Pool, _Evidence]) -> None:
    """Pods of two target revisions cannot pair. Where only an old record tells of one pool, the other knows better."""
    prefill, decode = kept.get(Pool.PREFILL), kept.get(Pool.DECODE)
    if prefill and decode and prefill.pin.target_revision != decode.pin.target_revision:
        del kept[Pool.DECODE if decode.number < prefill.number else Pool.PREFILL]


def _target_to_keep(
    snapshot: Snapshot,
    kept: Mapping[Pool, _Evidence],
    evidence: Mapping[Pool, tuple[_Evidence, ...]],
    *,
    upgrade: str,
) -> PoolPin | None:
    """A serving pool's pin whose image and target revision are those of any other that is resolved anew.

    None if what decides the target has changed, or an upgrade is asked for.
    """
    serving = (Pool.DECODE, Pool.PREFILL)
    for pool in serving:
        if pool in kept:
            return kept[pool].pin
    inputs = target_inputs(snapshot.service)
    holding = [
        e for pool in serving for e in evidence.get(pool, ()) if e.upgrade == upgrade and e.pin.target_inputs == inputs
    ]
    return max(holding, key=lambda e: e.number).pin if holding else None


def _resolve_anew(snapshot: Snapshot, pool: Pool, target: PoolPin | None) -> Resolved:
    launch = _launch(snapshot, pool)
    return _resolved_to(snapshot, launch if target is None else _with_target(launch, target), pool)


def _with_target(launch: Launch, target: PoolPin) -> Launch:
    """`launch` with what pods must have in common to pair: with all of `target`, or without certificates as it is."""
    if isinstance(launch, GatewayLaunch):
        return launch
    server = None if target.identity_server is None else launch.identity_server or target.identity_server
    return replace(launch, image=target.image, target_revision=target.target_revision, identity_server=server)


def _keep(snapshot: Snapshot, pool: Pool, found: _Evidence) -> Resolved:
    """What was found. A live workload may have been edited: what it was rendered from is better, where it is known."""
    pin = found.pin
    if found.record is None:
        launch = _with_target(_launch(snapshot, pool, max_draft_tokens=pin.max_draft_tokens), pin)
        if pool_revision(launch) == pin.revision:
            return _resolved_to(snapshot, launch, pool)
    return Resolved(
        pool=pool,
        inputs=pin.inputs,
        target_inputs=pin.target_inputs,
        revision=pin.revision,
        target_revision=pin.target_revision,
        image=pin.image,
        max_draft_tokens=pin.max_draft_tokens,
        identity_server=pin.identity_server,
        template=pin.template,
    )


def _resolved_to(snapshot: Snapshot, launch: Launch, pool: Pool) -> Resolved:
    engine = launch if isinstance(launch, EngineLaunch) else None
    return Resolved(
        pool=pool,
        inputs=pool_inputs(snapshot.service, pool),
        target_inputs=target_inputs(snapshot.service) if engine else "",
        revision=pool_revision(launch),
        target_revision=engine.target_revision if engine else "",
        image=launch.image,
        max_draft_tokens=engine.draft.max_tokens if engine and engine.draft else None,
        identity_server=engine.identity_server if engine else None,
        launch=launch,
    )


def _launch(snapshot: Snapshot, pool: Pool, *, max_draft_tokens: int | None = None) -> Launch:
    """What this operator makes of the spec."""
    if pool is Pool.GATEWAY:
        return gateway_launch(snapshot.service, config=snapshot.config)
    return engine_launch(snapshot.service, pool, config=snapshot.config, max_draft_tokens=max_draft_tokens)


def _newer_image(snapshot: Snapshot, resolved: Resolved) -> str | None:
    launch = _launch(snapshot, resolved.pool, max_draft_tokens=resolved.max_draft_tokens)
    return None if pool_revision(launch) == resolved.revision else launch.image


def _stored_as(
    snapshot: Snapshot, kept: Mapping[Pool, _Evidence], pools: tuple[Pool, ...], *, upgrade: str
) -> Record | None:
    """The last record, if it says of every pool what it is, and of no other."""
    record = _last_record(snapshot)
    if record is None or record.upgrade != upgrade or set(record.pins) != set(pools):
        return None
    return record if all(pool in kept and kept[pool].record is record for pool in pools) else None


def _next_number(snapshot: Snapshot, kept: Mapping[Pool, _Evidence], pools: tuple[Pool, ...]) -> int:
    """Higher than that of any record. Where the live workloads already say it all, it is theirs.

    So a record that the cluster refuses is not numbered anew with every try.
    """
    record = _last_record(snapshot)
    last = record.number if record else 0
    live = max((w.record for w in snapshot.workloads), default=0)
    is_known = live > last and all(pool in kept and kept[pool].record is None for pool in pools)
    return live if is_known else max(last, live) + 1
