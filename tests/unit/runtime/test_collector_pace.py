"""How fast pods are asked, how many at once, and to which of them connections stay open."""

import asyncio

from specserve_operator.core.objects import ServiceKey
from tests.fakes.clock import settle
from tests.unit.runtime.collecting import World


async def test_calls_are_bounded() -> None:
    world = World(max_concurrent_calls=3)
    for i in range(10):
        world.pod(f"p{i}", f"10.0.0.{i}")
    await world.collector.poll()
    assert len(world.channels.asked) == 10
    assert world.channels.most_running == 3


async def test_many_pods_are_asked_one_service_after_the_other_over_the_whole_period() -> None:
    """Four pods at one call a second: the period is four seconds instead of two."""
    world = World(max_calls_per_second=1.0)
    other = world.cluster.put({"metadata": {"name": "other"}, "spec": {}})
    for i in range(1, 5):
        world.pod(f"d{i}", f"10.0.0.{i}")
    world.pod("x", "10.0.1.1", key=other)
    woken: list[ServiceKey] = []
    running = asyncio.create_task(world.collector.run(wake=woken.append))

    await settle()
    assert len(world.channels.asked) == 4
    world.clock.advance(3.9)
    await settle()
    assert len(world.channels.asked) == 4
    world.clock.advance(0.2)
    await settle()
    assert world.channels.asked[4:] == ["10.0.1.1"]
    assert woken == [world.key, other]

    # Stopping does not wait for the rest of the round.
    running.cancel()
    await settle()
    assert running.cancelled()


async def test_others_get_their_turn_while_many_services_are_looked_at() -> None:
    world, turns = World(), 0
    for number in range(40):
        world.cluster.put({"metadata": {"name": f"s{number}"}, "spec": {}})
    polling = asyncio.ensure_future(world.collector.poll())

    while not polling.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns >= 40


async def test_a_pod_that_hangs_delays_no_other_service_and_makes_no_statistics_stale() -> None:
    world = World(max_calls_per_second=1.0, stale_seconds=1.0)
    services = world.services_with_a_pod(4)
    world.channels.hung["10.0.0.0"] = world.clock
    async with world.collecting():
        await world.pass_time(40.0)
        # Each one every four seconds, though the first pod takes two of them.
        assert min(world.channels.asked.count(f"10.0.0.{i}") for i in range(1, 4)) >= 9
        assert all(world.collector.pod_stats(key) for key in services[1:])


async def test_connections_are_kept_to_so_many_pods_and_closed_after_the_answer_of_others() -> None:
    world = World(kept_channels=2)
    world.pod("a", "10.0.0.1")
    world.pod("b", "10.0.0.2")
    await world.collector.poll()
    assert (world.channels.kept, world.channels.dropped) == ({"10.0.0.1", "10.0.0.2"}, [])

    world.pod("c", "10.0.0.3")
    await world.collector.poll()
    assert (world.channels.kept, world.channels.dropped) == ({"10.0.0.1", "10.0.0.2"}, ["10.0.0.3"])


async def test_a_round_is_as_long_as_the_new_connections_take_but_for_pods_that_were_never_asked() -> None:
    """Three pods, connections to two of them: more than four seconds, though three calls a second may be made."""
    world = World(kept_channels=1, max_calls_per_second=3.0, max_connections_per_second=0.5)
    world.services_with_a_pod(3)
    async with world.collecting():
        await world.pass_time(1.9)
        assert len(world.channels.asked) == 3
        await world.pass_time(4.2)  # 1/3 s to the first, 2 s to each of the others
        assert len(world.channels.asked) == 6
        await world.pass_time(4.3)
        assert len(world.channels.asked) == 9


async def test_pods_that_were_never_asked_come_first() -> None:
    world = World(max_calls_per_second=10.0, max_connections_per_second=0.5, kept_channels=0)
    late = world.services_with_a_pod(4)[3]
    pod = world.pod("p3", "10.0.0.3", key=late, ready=False)
    async with world.collecting():
        await world.pass_time(4.0)
        assert world.channels.asked[:3] == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]

        pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        asked = len(world.channels.asked)
        await world.pass_time(8.0)
        assert "10.0.0.3" in world.channels.asked[asked : asked + 3]


async def test_a_service_that_is_made_anew_was_not_asked() -> None:
    world = World()
    world.pod("d", "10.0.0.1")
    await world.collector.poll()
    assert world.collector.has_asked(world.key)
    world.channels.hung["10.0.0.1"] = world.clock
    world.make_service_anew()
    polling = asyncio.ensure_future(world.collector.poll())
    await settle()
    assert not world.collector.has_asked(world.key)
    polling.cancel()
    await settle()


async def test_turns_that_come_late_make_no_round_longer() -> None:
    """A busy event loop wakes only every half a second; a turn is due every tenth."""
    world = World(max_calls_per_second=10.0)
    world.services_with_a_pod(40)
    async with world.collecting():
        for _ in range(8):
            world.clock.advance(0.5)
            for _ in range(6):  # turns that are late are taken one after the other
                await settle()
                world.clock.advance(0.0)
        assert len(world.channels.asked) == 40
