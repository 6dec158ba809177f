"""The work queue's promises, on a clock that the tests move."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.runtime.workqueue import Backoff, QueueShutDown, WorkQueue
from tests.fakes.clock import FakeClock, settle


def make_queue(clock: FakeClock | None = None, **backoff: float) -> WorkQueue[str]:
    return WorkQueue(clock or FakeClock(), backoff=Backoff(**backoff) if backoff else None)


async def test_keys_come_out_in_the_order_they_were_added() -> None:
    queue = make_queue()
    for key in ("b", "a", "c"):
        queue.add(key)
    assert [await queue.get() for _ in range(3)] == ["b", "a", "c"]


async def test_a_key_added_twice_comes_out_once() -> None:
    queue = make_queue()
    queue.add("a")
    queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_a_key_added_while_it_is_worked_on_comes_out_again_only_after_done() -> None:
    queue = make_queue()
    queue.add("a")
    await queue.get()
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")
    assert len(queue) == 1
    assert await queue.get() == "a"


async def test_a_delayed_key_comes_out_when_its_time_has_come() -> None:
    clock = FakeClock()
    queue = make_queue(clock)
    queue.add_after("a", 5.0)
    clock.advance(4.9)
    assert len(queue) == 0
    clock.advance(0.2)
    assert await queue.get() == "a"


@pytest.mark.parametrize(("delays", "due"), [((9.0, 2.0), 2.0), ((2.0, 9.0), 2.0), ((3.0, 0.0), 0.0)])
async def test_the_earliest_of_several_delays_counts(delays: tuple[float, ...], due: float) -> None:
    clock = FakeClock()
    queue = make_queue(clock)
    for delay in delays:
        queue.add_after("a", delay)
    if due > 0:
        clock.advance(due - 0.01)
        assert len(queue) == 0
    clock.advance(0.02)
    assert len(queue) == 1


async def test_backoff_doubles_up_to_its_limit_and_starts_anew_after_forget() -> None:
    queue = make_queue(base_seconds=1.0, max_seconds=5.0)
    assert [queue.add_rate_limited("a") for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    queue.forget("a")
    assert queue.add_rate_limited("a") == 1.0


async def test_backoff_of_one_key_leaves_others_alone() -> None:
    queue = make_queue(base_seconds=1.0, max_seconds=60.0)
    queue.add_rate_limited("a")
    assert queue.add_rate_limited("b") == 1.0


def test_backoff_survives_any_number_of_failures() -> None:
    assert Backoff(base_seconds=0.1, max_seconds=60.0).delay_seconds(100_000) == 60.0


async def test_a_waiting_worker_is_woken_by_add() -> None:
    queue = make_queue()
    worker = asyncio.create_task(queue.get())
    await settle()
    queue.add("a")
    assert await worker == "a"


async def test_a_worker_cancelled_in_the_moment_it_was_woken_hands_its_turn_on() -> None:
    queue = make_queue()
    first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
    await settle()
    queue.add("a")  # wakes the first
    first.cancel()
    assert await second == "a"
    assert first.cancelled()


async def test_shutting_down_gives_out_what_is_in_line_and_then_ends_every_worker() -> None:
    queue = make_queue()
    queue.add("a")
    queue.add_after("b", 1.0)
    queue.shut_down()
    queue.add("c")
    assert await queue.get() == "a"
    with pytest.raises(QueueShutDown):
        await queue.get()


async def test_shutting_down_ends_workers_that_wait() -> None:
    queue = make_queue()
    workers = [asyncio.create_task(queue.get()) for _ in range(3)]
    await settle()
    queue.shut_down()
    results = await asyncio.gather(*workers, return_exceptions=True)
    assert [type(r) for r in results] == [QueueShutDown] * 3


async def test_the_age_of_the_oldest_key_counts_from_its_first_add() -> None:
    clock = FakeClock()
    queue = make_queue(clock)
    assert queue.oldest_age_seconds() == 0.0
    queue.add("a")
    clock.advance(3.0)
    queue.add("a")
    queue.add("b")
    assert queue.oldest_age_seconds() == 3.0
    await queue.get()
    assert queue.oldest_age_seconds() == 0.0


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc")),
        st.tuples(st.just("later"), st.sampled_from("abc"), st.floats(0.0, 4.0)),
        st.tuples(st.just("fail"), st.sampled_from("abc")),
        st.tuples(st.just("advance"), st.floats(0.0, 2.0)),
        st.tuples(st.just("finish"), st.sampled_from("abc")),
    ),
    max_size=60,
)


@given(steps=steps, workers=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_no_key_is_held_twice_and_nothing_added_is_lost(steps: list[tuple], workers: int) -> None:
    asyncio.run(check_promises(steps, workers))


async def check_promises(steps: list[tuple], workers: int) -> None:  # noqa: C901 - one step after the other
    clock = FakeClock()
    queue: WorkQueue[str] = WorkQueue(clock)
    held: Counter[str] = Counter()
    may_finish = {key: asyncio.Event() for key in "abc"}
    started_at: dict[str, int] = {}  # step in which the key was last taken
    added_at: dict[str, int] = {}  # step in which the key was last due
    step_number = 0

    async def work() -> None:
        while True:
            try:
                key = await queue.get()
            except QueueShutDown:
                return
            held[key] += 1
            assert held[key] == 1, f"{key} is worked on twice at once"
            started_at[key] = step_number
            await may_finish[key].wait()
            may_finish[key].clear()
            held[key] -= 1
            queue.done(key)

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    for step in steps:
        await settle()
        step_number += 1
        match step:
            case ("add", key):
                queue.add(key)
                added_at[key] = step_number
            case ("later", key, delay):
                queue.add_after(key, delay)
                added_at[key] = step_number
            case ("fail", key):
                queue.add_rate_limited(key)
                added_at[key] = step_number
            case ("advance", seconds):
                clock.advance(seconds)
            case ("finish", key):
                may_finish[key].set()

    # Everything becomes due and every worker finishes: each key must have been taken after its last add.
    step_number += 1
    clock.advance(1000.0)
    for _ in range(20):
        for event in may_finish.values():
            event.set()
        await settle()
    queue.shut_down()
    await asyncio.wait_for(asyncio.gather(*tasks), timeout=5)
    for key, when in added_at.items():
        assert started_at[key] >= when, f"{key} was added in step {when} and never taken afterwards"
    assert len(queue) == 0
