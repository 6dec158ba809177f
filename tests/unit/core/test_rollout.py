"""A rollout keeps its bounds at every step and ends, whatever it starts from."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.core.rollout import Bounds, Pairing, Replicas, next_step, pair

MAX_STEPS = 300
bounds_strategy = st.builds(Bounds, max_surge=st.integers(0, 4), max_unavailable=st.integers(0, 4)).filter(
    lambda b: b.max_surge + b.max_unavailable > 0
)


@dataclass
class SimulatedPool:
    """Workloads as a cluster keeps them. Pods become ready when `start` is called, old ones first go unready ones."""

    desired: int
    bounds: Bounds
    current: list[bool] = field(default_factory=list)  # one entry a pod: is it ready?
    old: list[list[bool]] = field(default_factory=list)

    def step(self, *, limit: int | None = None, hold: int = 0) -> bool:
        """Carries out one step; False if it changes nothing."""
        step = next_step(
            self.desired,
            observed(self.current),
            old=[observed(o) for o in self.old],
            bounds=self.bounds,
            limit=limit,
            hold=hold,
        )
        before = (list(self.current), [list(o) for o in self.old])
        resize(self.current, step.current)
        for pods, wanted in zip(self.old, step.old, strict=True):
            resize(pods, wanted)
        return before != (self.current, self.old)

    def start(self, count: int = 1000) -> None:
        for i, is_ready in enumerate(self.current):
            if not is_ready and count:
                self.current[i], count = True, count - 1

    @property
    def total(self) -> int:
        return len(self.current) + sum(map(len, self.old))

    @property
    def ready(self) -> int:
        return sum(self.current) + sum(map(sum, self.old))

    @property
    def is_done(self) -> bool:
        return self.current == [True] * self.desired and not any(self.old)


def observed(pods: list[bool]) -> Replicas:
    return Replicas(wanted=len(pods), ready=sum(pods))


def resize(pods: list[bool], wanted: int) -> None:
    pods.sort(reverse=True)  # a ReplicaSet deletes what is not ready first
    del pods[wanted:]
    pods += [False] * (wanted - len(pods))


def replicas(wanted: int, ready: int) -> Replicas:
    return Replicas(wanted, ready)


pods_strategy = st.lists(st.booleans(), max_size=6)


@settings(max_examples=300)
@given(
    desired=st.integers(0, 8),
    bounds=bounds_strategy,
    current=pods_strategy,
    old=st.lists(pods_strategy, max_size=3),
    starts=st.lists(st.integers(0, 3), max_size=40),
)
def test_bounds_hold_at_every_step_and_the_rollout_ends(
    desired: int, bounds: Bounds, current: list[bool], old: list[list[bool]], starts: list[int]
) -> None:
    pool = SimulatedPool(desired, bounds, current, old)
    floor = max(desired - bounds.max_unavailable, 0)
    pace = iter(starts)
    for _ in range(MAX_STEPS):
        total, ready = pool.total, pool.ready
        changed = pool.step()
        assert pool.total <= max(total, desired + bounds.max_surge)
        assert pool.ready >= min(ready, floor), "a step took a ready pod below the floor"
        if pool.is_done and not changed:
            return
        pool.start(next(pace, 1000))
    pytest.fail(f"not done after {MAX_STEPS} steps: {pool}")


@given(desired=st.integers(1, 8), bounds=bounds_strategy)
def test_a_new_revision_that_never_gets_ready_leaves_the_old_one_serving(desired: int, bounds: Bounds) -> None:
    pool = SimulatedPool(desired, bounds, old=[[True] * desired])
    for _ in range(50):
        pool.step()
    assert sum(pool.old[0]) == max(desired - bounds.max_unavailable, 0)
    assert len(pool.current) <= bounds.max_surge + bounds.max_unavailable


@given(desired=st.integers(2, 8), bounds=bounds_strategy, failures=st.lists(st.integers(0, 7), max_size=40))
def test_old_pods_that_fail_one_at_a_time_are_not_worn_away_by_a_broken_revision(
    desired: int, bounds: Bounds, failures: list[int]
) -> None:
    pool = SimulatedPool(desired, bounds, old=[[True] * desired])
    allowance = bounds.max_surge + bounds.max_unavailable
    for failing in failures:
        if len(pool.old[0]) < 2:
            break  # the last one is down: there is nothing left to protect
        pool.old[0][failing % len(pool.old[0])] = False
        pool.step()
        pool.old[0] = [True] * len(pool.old[0])  # it recovers, as it would have done
        assert len(pool.old[0]) >= min(desired - allowance, desired - bounds.max_unavailable)


def test_old_pods_that_only_pause_are_kept_while_the_others_are_too_few() -> None:
    bounds = Bounds(max_surge=1, max_unavailable=0)
    old = Replicas(wanted=1, ready=0, paused=1)
    assert next_step(1, Replicas(1, 0), old=[old], bounds=bounds).old == (1,)
    assert next_step(1, Replicas(1, 1), old=[old], bounds=bounds).old == (0,)


def test_failed_old_pods_make_room_for_new_ones_that_have_no_node() -> None:
    bounds = Bounds(max_surge=1, max_unavailable=0)
    old = Replicas(wanted=3, ready=2)
    assert next_step(3, Replicas(1, 0, unplaced=1), old=[old], bounds=bounds).old == (2,)
    # With a node it had its chance: it may be broken, so nothing more is given up for it.
    assert next_step(3, Replicas(1, 0), old=[old], bounds=bounds).old == (3,)


@given(desired=st.integers(1, 6), bounds=bounds_strategy)
def test_going_back_half_way_ends_with_the_first_revision(desired: int, bounds: Bounds) -> None:
    forward = SimulatedPool(desired, bounds, old=[[True] * desired])
    for _ in range(desired // 2 + 1):
        forward.step()
        forward.start()
    back = SimulatedPool(desired, bounds, current=forward.old[0], old=[forward.current])
    for _ in range(MAX_STEPS):
        back.step()
        back.start()
    assert back.is_done


def test_a_single_replica_without_surge_is_replaced_in_its_place() -> None:
    bounds = Bounds(max_surge=0, max_unavailable=1)
    assert next_step(1, replicas(0, 0), old=[replicas(1, 1)], bounds=bounds).old == (0,)
    assert next_step(1, replicas(0, 0), old=[replicas(0, 0)], bounds=bounds).current == 1


def test_a_single_replica_with_surge_stays_until_its_successor_is_ready() -> None:
    bounds = Bounds(max_surge=1, max_unavailable=0)
    step = next_step(1, replicas(0, 0), old=[replicas(1, 1)], bounds=bounds)
    assert (step.current, step.old) == (1, (1,))
    step = next_step(1, replicas(1, 0), old=[replicas(1, 1)], bounds=bounds)
    assert (step.current, step.old) == (1, (1,))
    step = next_step(1, replicas(1, 1), old=[replicas(1, 1)], bounds=bounds)
    assert (step.current, step.old) == (1, (0,))


def test_unready_old_pods_make_room_in_a_full_cluster() -> None:
    """The surge pod waits for the GPU that a crashing old pod holds."""
    bounds = Bounds(max_surge=1, max_unavailable=0)
    step = next_step(3, replicas(1, 0), old=[replicas(3, 0)], bounds=bounds)
    assert step.old == (2,)


def test_the_oldest_revision_is_given_up_first() -> None:
    bounds = Bounds(max_surge=1, max_unavailable=0)
    step = next_step(4, replicas(2, 2), old=[replicas(1, 1), replicas(2, 2)], bounds=bounds)
    assert step.old == (0, 2)


def test_a_pool_without_old_revisions_gets_all_its_replicas_at_once() -> None:
    step = next_step(5, replicas(0, 0), old=[], bounds=Bounds(max_surge=1, max_unavailable=0))
    assert step.current == 5


def test_scaling_down_in_the_middle_of_a_rollout_never_grows_the_pool() -> None:
    step = next_step(1, replicas(2, 2), old=[replicas(2, 2)], bounds=Bounds(max_surge=1, max_unavailable=0))
    assert (step.current, step.old) == (1, (0,))


def test_new_decode_pods_wait_for_new_prefill_pods() -> None:
    assert pair(prefill_desired=2, prefill_ready=0, decode_desired=4, old_decode_ready=4, can_surge=True) == Pairing(
        decode_limit=0, prefill_hold=2
    )
    assert pair(prefill_desired=2, prefill_ready=1, decode_desired=4, old_decode_ready=2, can_surge=True) == Pairing(
        decode_limit=2, prefill_hold=1
    )


def test_pairing_does_not_bind_without_old_decode_pods_or_at_zero() -> None:
    assert pair(prefill_desired=2, prefill_ready=0, decode_desired=4, old_decode_ready=0, can_surge=True) == Pairing()
    assert pair(prefill_desired=0, prefill_ready=0, decode_desired=0, old_decode_ready=2, can_surge=True) == Pairing()


@settings(max_examples=300)
@given(
    prefill_desired=st.integers(1, 5),
    decode_desired=st.integers(1, 8),
    bounds=bounds_strategy,
    old_prefill=st.integers(1, 2),
    old_decode=st.integers(1, 2),
    starts=st.lists(st.integers(0, 3), max_size=40),
)
def test_prefill_and_decode_roll_together_and_end(
    *,
    prefill_desired: int,
    decode_desired: int,
    bounds: Bounds,
    old_prefill: int,
    old_decode: int,
    starts: list[int],
) -> None:
    """Over any number of old revisions each, and however slowly pods start."""
    prefill = SimulatedPool(prefill_desired, bounds, old=split(prefill_desired, old_prefill))
    decode = SimulatedPool(decode_desired, bounds, old=split(decode_desired, old_decode))
    pace = iter(starts)
    for _ in range(MAX_STEPS):
        old_decode_ready = sum(map(sum, decode.old))
        pairing = pair(
            prefill_desired=prefill_desired,
            prefill_ready=sum(prefill.current),
            decode_desired=decode_desired,
            old_decode_ready=old_decode_ready,
            can_surge=bounds.max_surge > 0,
        )
        prefill.step(hold=pairing.prefill_hold)
        decode.step(limit=pairing.decode_limit)
        if old_decode_ready:
            assert sum(map(sum, prefill.old)) >= 1, "old decode pods lost their last peer"
        if prefill.is_done and decode.is_done:
            return
        prefill.start(next(pace, 1000))
        decode.start(next(pace, 1000))
    pytest.fail(f"not done after {MAX_STEPS} steps: {prefill} {decode}")


def split(count: int, parts: int) -> list[list[bool]]:
    """`count` ready pods over `parts` old revisions."""
    return [[True] * (count // parts + (i < count % parts)) for i in range(parts)]
