"""The next step from old revisions of a pool to its current one. Arithmetic on replica counts, no state.

A step is a function of what is observed, so a rollout survives a restart of the operator, and A -> B -> A is nothing
special. With `desired` = N:

    surge    all revisions together are never raised above N + maxSurge
    floor    ready old pods are given up only while more than N - maxUnavailable are ready
    failed   old pods that are down go first, and do not count against the floor: they serve nobody and may hold the
             room that new pods wait for. Pods that only pause (started, not ready for a moment) go after them, and
             only while enough others serve; with fewer, no more than new ones serve.
    caution  while old pods serve, only maxSurge + maxUnavailable new ones may be unready, and as many failed old pods
             are kept. So a new revision that never gets ready takes no more than that from the old one.

Prefill and decode pods pair within one target revision. While both change theirs, decode goes ahead of its old prefill
pods and behind its new ones (`pair`), each within one step, so that pods of either revision find peers. A decode pod
without a peer prefills by itself, so a pairing that cannot be kept costs time and loses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicas:
    """Pods of one revision.

    `wanted`: what its workload was told. `ready`: how many serve. `paused`: started, and not ready at the moment, or
    not for long enough.
    `unplaced`: no node has them yet, which says nothing about whether they would work. All others are down.
    """

    wanted: int
    ready: int
    paused: int = 0
    unplaced: int = 0

    @property
    def serving(self) -> int:
        """Ready pods that will stay: a workload that was just told to shrink may still show more."""
        return min(self.wanted, self.ready)

    @property
    def pausing(self) -> int:
        return min(self.paused, self.wanted - self.serving)

    @property
    def failed(self) -> int:
        return self.wanted - self.serving - self.pausing

    @property
    def doubtful(self) -> int:
        """Pods that had what they need to get ready, and have not."""
        return max(self.wanted - self.serving - self.unplaced, 0)


@dataclass(frozen=True, slots=True)
class Bounds:
    max_surge: int
    max_unavailable: int


@dataclass(frozen=True, slots=True)
class Step:
    """What every revision is to have next; `old` in the order given."""

    current: int
    old: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pairing:
    """`decode_limit`: the most decode pods of the current revision; `prefill_hold`: old prefill pods still needed."""

    decode_limit: int | None = None
    prefill_hold: int = 0


def next_step(
    desired: int,
    current: Replicas,
    *,
    old: Sequence[Replicas],
    bounds: Bounds,
    limit: int | None = None,
    hold: int = 0,
) -> Step:
    """One step of a pool; equal to what is observed when there is nothing to do but wait.

    `old` is in the order in which revisions are given up. `limit` bounds the current revision while it grows, `hold`
    the ready old pods from below; but it holds no pod above the surge, which may be smaller than it was: in a full
    cluster those that it is held for may be waiting for its room.
    """
    total = current.wanted + sum(o.wanted for o in old)
    grown = _grow(desired, current, room=desired + bounds.max_surge - total, old=old, bounds=bounds, limit=limit)
    floor = max(desired - bounds.max_unavailable, 0)

    old_serving = sum(o.serving for o in old)
    serving = min(current.serving, grown) + old_serving
    spare = total - floor - (current.doubtful if old_serving else 0)
    failed = _take([o.failed for o in old], at_most=spare)
    left = spare - sum(failed)
    paused = _take([o.pausing for o in old], at_most=left if serving >= floor else min(left, current.serving))
    excess = grown + sum(o.wanted for o in old) - desired - bounds.max_surge
    ready = _take([o.serving for o in old], at_most=min(serving - floor, max(old_serving - hold, excess)))
    kept = (o.wanted - f - p - r for o, f, p, r in zip(old, failed, paused, ready, strict=True))
    return Step(current=grown, old=tuple(kept))


def _grow(
    desired: int, current: Replicas, *, room: int, old: Sequence[Replicas], bounds: Bounds, limit: int | None
) -> int:
    """What the current revision is to have; less than before only where more than `desired` were wanted."""
    most = current.wanted + max(room, 0)
    if limit is not None:
        most = min(most, limit)
    if any(o.serving for o in old):
        most = min(most, current.serving + bounds.max_surge + bounds.max_unavailable)
    return min(desired, max(most, current.wanted))


def _take(available: Sequence[int], *, at_most: int) -> list[int]:
    """How many to take of each, from the first on, together `at_most`."""
    taken = []
    for count in available:
        taken.append(max(min(count, at_most), 0))
        at_most -= taken[-1]
    return taken


def pair(
    *,
    prefill_desired: int,
    prefill_ready: int,
    decode_desired: int,
    old_decode_ready: int,
    can_surge: bool,
) -> Pairing:
    """Keeps both pools in step while their target revision changes.

    `prefill_ready` counts ready prefill pods of the new target revision, `old_decode_ready` ready decode pods of any
    other. Old prefill pods stay in the share of the old decode pods; new decode pods come in the share of the new
    prefill pods. Without surge a new prefill pod may have to wait for an old one, which waits for old decode pods: then
    decode is not limited, which breaks the circle.
    """
    if not (prefill_desired and decode_desired and old_decode_ready):
        return Pairing()
    hold = _ceil_div(prefill_desired * old_decode_ready, decode_desired)
    limit = _ceil_div(decode_desired * prefill_ready, prefill_desired) if can_surge else None
    return Pairing(decode_limit=limit, prefill_hold=min(hold, prefill_desired))


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
