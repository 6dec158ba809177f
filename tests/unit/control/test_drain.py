import asyncio

from specserve_workers.control.drain import DrainState


async def test_an_idle_pod_is_drained_at_once():
    drain = DrainState()
    assert await drain.wait(0.0) is True
    assert drain.draining


async def test_draining_ends_with_the_last_running_request():
    drain = DrainState()
    task = asyncio.create_task(asyncio.Event().wait())
    drain.enter(task)
    waiting = asyncio.create_task(drain.wait(60))
    await asyncio.sleep(0)
    assert not waiting.done()
    drain.leave(task)
    assert await waiting is True
    task.cancel()


async def test_the_time_counts_from_when_draining_began():
    clock = iter([100.0, 100.0, 160.0])
    drain = DrainState(clock=lambda: next(clock))
    task = asyncio.create_task(asyncio.Event().wait())
    drain.enter(task)
    drain.start()
    assert await drain.wait(0.0) is False
    # 60 of 50 seconds have gone by: no second wait.
    assert await drain.wait(50.0) is False
    task.cancel()


async def test_what_is_held_for_others_keeps_the_pod():
    held = iter([True, False])
    drain = DrainState(is_held=lambda: next(held))
    assert await drain.wait(5.0) is True


async def test_cutting_cancels_what_still_runs():
    drain = DrainState()
    task = asyncio.create_task(asyncio.Event().wait())
    drain.enter(task)
    await asyncio.sleep(0)
    assert await drain.cut() == 1
    assert task.cancelled()
    assert drain.expired


async def test_what_is_held_is_asked_anew_once_the_last_request_has_ended():
    asked: list[int] = []
    held = [False]

    async def refresh() -> None:
        asked.append(drain.running)
        held[0] = len(asked) == 1

    def is_held() -> bool:
        answer, held[0] = held[0], False
        return answer

    drain = DrainState(is_held=is_held, refresh=refresh)
    task = asyncio.create_task(asyncio.Event().wait())
    drain.enter(task)
    waiting = asyncio.create_task(drain.wait(60))
    await asyncio.sleep(0)
    assert asked == []
    drain.leave(task)
    assert await waiting is True
    assert asked == [0]
    assert held == [False]
    task.cancel()


async def test_numbers_that_never_come_do_not_hold_the_pod_beyond_its_time():
    async def refresh() -> None:
        await asyncio.Event().wait()

    assert await DrainState(refresh=refresh).wait(0.01) is False


async def test_without_time_nothing_is_asked():
    async def refresh() -> None:
        raise AssertionError("asked")

    assert await DrainState(refresh=refresh).wait(0.0) is True
