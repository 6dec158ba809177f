"""Rollouts of a whole service in a cluster where everything takes time, with whatever may happen on the way."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.names import Pool
from specserve_operator.core.plan import plan
from specserve_operator.core.status import compute_status
from tests.unit.core.builders import disaggregated, make_snapshot
from tests.unit.core.world import TICK_SECONDS, World

POOLS = ("prefill", "decode")
SURGE, NO_SURGE = {"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": 0, "maxUnavailable": 1}
PATIENT = {"minReadySeconds": 2 * TICK_SECONDS}
BOUNDS = [SURGE, NO_SURGE, {"maxSurge": 2, "maxUnavailable": 1}, SURGE | PATIENT, NO_SURGE | PATIENT]


def service(target: str, *, prefill: int = 1, decode: int = 2, **rollout: int) -> SpeculativeService:
    return disaggregated(
        model={"uri": f"file:///models/{target}"},
        prefill={"replicas": prefill},
        decode={"replicas": decode},
        rollout=rollout or SURGE,
    )


def running(wanted: SpeculativeService, **world: Any) -> World:
    found = World(**world)
    found.settle(wanted)
    return found


def wanted_names(wanted: SpeculativeService) -> dict[str, set[str]]:
    return {str(p.pool): {p.current.name} for p in plan(make_snapshot(wanted)).pools}


def assert_at_rest(world: World, wanted: SpeculativeService) -> None:
    """Exactly the wanted pods, all ready, and nothing that is left over."""
    names = wanted_names(wanted)
    sizes = {p.pool: p.desired for p in plan(make_snapshot(wanted)).pools}
    for pool in Pool:
        assert world.names(pool) == names[pool]
        assert len(world.pods(pool)) == world.ready(pool) == sizes[pool]


def verdict(status: dict[str, Any], type_: str) -> tuple[str, str]:
    found = next(c for c in status["conditions"] if c["type"] == type_)
    return found["status"], found["reason"]


@pytest.mark.parametrize("bounds", [SURGE, NO_SURGE, SURGE | PATIENT, NO_SURGE | PATIENT])
@pytest.mark.parametrize("ticks", range(0, 12, 2))
@pytest.mark.parametrize("last", ["a", "c"])
def test_a_to_b_to_another_or_back_at_any_time_ends_with_the_last_and_serves_all_the_time(
    bounds: dict[str, int], ticks: int, last: str
) -> None:
    world = running(service("a", decode=3, **bounds), start_ticks=2, drain_ticks=2)
    floor = 3 - bounds["maxUnavailable"]
    for target, steps in (("b", ticks), (last, 60)):
        for _ in range(steps):
            world.reconcile(service(target, decode=3, **bounds))
            world.tick()
            assert world.ready("decode") >= floor
            assert world.active("decode") <= 3 + bounds["maxSurge"]
    world.settle(service(last, decode=3, **bounds))
    assert_at_rest(world, service(last, decode=3, **bounds))


def test_one_replica_is_replaced_without_a_moment_of_silence() -> None:
    world = running(service("a", decode=1))
    for _ in range(30):
        world.reconcile(service("b", decode=1))
        world.tick()
        assert world.ready("decode") >= 1
        assert world.ready("prefill") >= 1
    assert_at_rest(world, service("b", decode=1))


def test_without_surge_a_full_cluster_is_rolled_through() -> None:
    world = running(service("a", prefill=2, decode=3, **NO_SURGE), capacity=6)
    for _ in range(60):
        world.reconcile(service("b", prefill=2, decode=3, **NO_SURGE))
        world.tick()
        assert world.ready("decode") >= 2
        assert world.active("decode") <= 3
    assert_at_rest(world, service("b", prefill=2, decode=3, **NO_SURGE))


def test_with_surge_a_full_cluster_stalls_and_serves_until_the_bounds_allow_more() -> None:
    bounds = {**SURGE, "progressDeadlineSeconds": 100}
    world = running(service("a", decode=3, **bounds), capacity=5)
    status: dict[str, Any] = {}
    for _ in range(30):
        b = service("b", decode=3, **bounds).model_copy(update={"status": status})
        plan_ = world.reconcile(b)
        world.tick()
        status = compute_status(make_snapshot(b, world.children(), now=world.now), plan_)
        assert world.ready("decode") == 3
    assert verdict(status, "Progressing") == ("False", "RolloutStalled")
    assert verdict(status, "PrefillReady") == ("False", "InsufficientCapacity")
    world.settle(service("b", decode=3, **NO_SURGE))
    assert_at_rest(world, service("b", decode=3, **NO_SURGE))


def test_old_pods_that_do_not_serve_are_replaced_first_and_hold_nothing_up() -> None:
    world = running(service("a", decode=3), capacity=5)
    for index in range(3):
        world.fail_pod("decode", index)
    assert world.ready("decode") == 0
    for _ in range(40):
        before = world.ready("decode")
        world.reconcile(service("b", decode=3))
        world.tick()
        assert world.ready("decode") >= before
    assert_at_rest(world, service("b", decode=3))


def test_a_broken_revision_costs_no_ready_pod_and_the_next_one_takes_over() -> None:
    world = running(service("a", prefill=2, decode=4))
    broken = service("b", prefill=2, decode=4)
    world.broken |= wanted_names(broken)["prefill"] | wanted_names(broken)["decode"]
    for _ in range(60):
        world.reconcile(broken)
        world.tick()
        assert (world.ready("prefill"), world.ready("decode")) == (2, 4)
    world.settle(service("c", prefill=2, decode=4))
    assert_at_rest(world, service("c", prefill=2, decode=4))


def test_a_revision_whose_pods_fail_soon_after_they_are_ready_costs_no_pod_that_stays() -> None:
    bounds = {**SURGE, "minReadySeconds": 3 * TICK_SECONDS, "progressDeadlineSeconds": 300}
    world = running(service("a", prefill=2, decode=4, **bounds))
    brittle = service("b", prefill=2, decode=4, **bounds)
    world.brittle |= wanted_names(brittle)["prefill"] | wanted_names(brittle)["decode"]
    status: dict[str, Any] = {}
    for _ in range(60):
        seen = brittle.model_copy(update={"status": status})
        plan_ = world.reconcile(seen)
        status = compute_status(make_snapshot(seen, world.children(), now=world.now), plan_)
        world.tick()
        assert world.ready("prefill", without=world.brittle) == 2
        assert world.ready("decode", without=world.brittle) == 4
    assert verdict(status, "Progressing") == ("False", "RolloutStalled")
    world.settle(service("c", prefill=2, decode=4, **bounds))
    assert_at_rest(world, service("c", prefill=2, decode=4, **bounds))


@pytest.mark.parametrize("bounds", [SURGE, NO_SURGE])
def test_old_pods_that_are_ready_only_now_and_then_do_not_hold_up_what_replaces_them(bounds: dict[str, int]) -> None:
    bounds = {**bounds, "minReadySeconds": 3 * TICK_SECONDS}
    world = running(service("a", decode=4, **bounds))
    world.flapping |= world.names("decode")
    for _ in range(80):
        world.reconcile(service("b", decode=4, **bounds))
        world.tick()
    assert_at_rest(world, service("b", decode=4, **bounds))


def test_a_pool_that_waits_for_young_pods_of_another_is_looked_at_when_they_are_old_enough() -> None:
    bounds = {**SURGE, "minReadySeconds": 2 * TICK_SECONDS}
    aggregated = disaggregated(prefill=None, decode={"replicas": 1}, rollout=bounds)
    world = running(aggregated)
    disaggregated_ = service("b", decode=1, **bounds)
    while not world.ready("prefill"):
        world.reconcile(disaggregated_)
        world.tick()
    seconds = world.reconcile(disaggregated_).requeue_after_seconds
    assert seconds is not None
    assert seconds <= 2 * TICK_SECONDS + 1


def test_a_rollout_is_over_when_the_last_pod_has_been_ready_for_long_enough() -> None:
    bounds = {**NO_SURGE, "minReadySeconds": 30}
    world = running(service("a", decode=1, **bounds))
    wanted, status, seen = service("b", decode=1, **bounds), dict[str, Any](), []
    for _ in range(20):
        now = wanted.model_copy(update={"status": status})
        status = compute_status(make_snapshot(now, world.children(), now=world.now), world.reconcile(now))
        progress = next(c for c in status["conditions"] if c["type"] == "Progressing")
        seen.append((progress["reason"], progress["message"]))
        world.tick()
    young = "decode: 1 of 1 pods updated and ready, 1 for less than 30 s"
    assert [young in message for _, message in seen].count(True) == 3
    assert seen[-1][0] == "RolloutComplete"


def test_without_a_bound_a_pod_counts_at_once_though_the_clock_that_says_since_when_is_ahead() -> None:
    wanted = service("a", decode=1)
    world = running(wanted)
    behind = world.now - timedelta(hours=1)
    plan_ = plan(make_snapshot(wanted, world.children(), now=behind))
    assert plan_.requeue_after_seconds is None


def test_an_old_pod_is_given_up_when_a_new_one_has_been_ready_for_long_enough() -> None:
    bounds = {**SURGE, "minReadySeconds": 2 * TICK_SECONDS}
    world = running(service("a", decode=1, **bounds))
    old = wanted_names(service("a", decode=1, **bounds))["decode"]
    ready_for = 0
    for _ in range(30):
        plan_ = world.reconcile(service("b", decode=1, **bounds))
        both = world.ready("decode") == 2
        if both and plan_.pool(Pool.DECODE).old[0].replicas:
            # Somebody looks again, though nothing changes by itself.
            assert plan_.requeue_after_seconds <= 2 * TICK_SECONDS + 1
        world.tick()
        ready_for += both
    assert ready_for == 2
    assert world.names("decode").isdisjoint(old)


events = st.one_of(
    st.tuples(st.just("target"), st.sampled_from("abc")),
    st.tuples(st.just("decode"), st.integers(1, 4)),
    st.tuples(st.just("prefill"), st.integers(1, 3)),
    st.tuples(st.just("fail"), st.integers(0, 3)),
    st.tuples(st.just("bounds"), st.sampled_from(BOUNDS)),
)


@settings(max_examples=40)
@given(
    bounds=st.sampled_from(BOUNDS),
    is_full=st.booleans(),
    start_ticks=st.integers(0, 3),
    drain_ticks=st.integers(1, 3),
    history=st.lists(st.tuples(events, st.lists(st.none() | st.integers(0, 20), min_size=1, max_size=5)), max_size=6),
)
def test_whatever_happens_ready_pods_are_kept_to_the_floor_and_the_last_spec_is_reached(
    *,
    bounds: dict[str, int],
    is_full: bool,
    start_ticks: int,
    drain_ticks: int,
    history: list[tuple[tuple[str, Any], list[int | None]]],
) -> None:
    """Changes of target, sizes and bounds, failing pods, and an operator that dies after any number of writes."""
    target, sizes = "a", {"prefill": 1, "decode": 2}
    wanted = service(target, **sizes, **bounds)
    world = running(wanted, start_ticks=start_ticks, drain_ticks=drain_ticks)
    world.capacity = 3 + 4 + 1 if is_full else None  # room for all sizes that come, and then for no surge
    for (event, value), passes in history:
        if event == "target":
            target = value
        elif event == "bounds":
            bounds = value
        elif event == "fail":
            world.fail_pod("decode", value)
        else:
            sizes[event] = value
        for dies_after in passes:
            ready = {pool: world.ready(pool) for pool in POOLS}
            active = {pool: world.active(pool) for pool in POOLS}
            world.reconcile(service(target, **sizes, **bounds), dies_after=dies_after)
            for pool in POOLS:
                floor = max(sizes[pool] - bounds["maxUnavailable"], 0)
                assert world.ready(pool) >= min(ready[pool], floor)
                assert world.active(pool) <= max(active[pool], sizes[pool] + bounds["maxSurge"])
            world.tick()
    world.repair()
    if bounds["maxSurge"]:
        world.capacity = None  # these bounds need room
    world.settle(service(target, **sizes, **bounds))
    assert_at_rest(world, service(target, **sizes, **bounds))
