"""Writes that cross with somebody else's: nothing of theirs is missed, and nobody is fought at full speed."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from specserve_operator.cluster.kube.client import KubeClient
from specserve_operator.cluster.kube.cluster import KubeCluster
from specserve_operator.cluster.kube.events import EventRecorder
from specserve_operator.cluster.kube.health import WatchHealth
from specserve_operator.cluster.kube.kinds import SERVICE
from specserve_operator.cluster.kube.repairs import BURST, SECONDS_EACH, RepairLimit
from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.core.objects import Manifest, ObjectRef, ServiceKey
from specserve_operator.probes import serving
from tests.fakes.clock import FakeClock
from tests.unit.cluster.test_kube_client import CONFIG_MAP, NOW, Server, config_map

KEY = ServiceKey("llm", "coder")


class World:
    """A cluster behind a real HTTP server that gives every write the next version."""

    def __init__(self, client: KubeClient, server: Server) -> None:
        self.server, self.clock, self.version = server, FakeClock(), 10
        recorder = EventRecorder(client, now=lambda: NOW, reporter="test")
        kinds = (SERVICE, CONFIG_MAP)
        self.cluster = KubeCluster(client, recorder, WatchHealth(lambda: 0.0), kinds=kinds, time=self.clock.time)
        server.is_empty = True
        server.answer = self.answer

    def answer(self, method: str, path: str, body: Manifest) -> tuple[int, Manifest]:
        self.version += 1
        return 200, body | {"metadata": body["metadata"] | {"resourceVersion": str(self.version)}}

    def changed_by_another(self, data: dict[str, str]) -> None:
        self.version += 1
        self.cluster.observe(CONFIG_MAP, config_map(data, version=str(self.version)))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with (
        serving(app, "127.0.0.1", 0) as port,
        KubeClient(Configuration(host=f"http://127.0.0.1:{port}")) as client,
    ):
        yield World(client, server)


async def test_an_object_that_is_changed_back_each_time_is_put_right_slowly_in_the_end(world: World) -> None:
    rendered = config_map({"a": "1"})
    await world.cluster.apply(rendered)
    for _ in range(BURST):
        world.changed_by_another({"a": "2"})
        assert await world.cluster.apply(rendered) is ApplyOutcome.CONFIGURED

    world.changed_by_another({"a": "2"})
    with pytest.raises(ClusterError, match="ConfigMap llm/coder-runtime is changed back again and again"):
        await world.cluster.apply(rendered)
    assert len(world.server.writes) == 1 + BURST

    world.clock.advance(SECONDS_EACH)
    assert await world.cluster.apply(rendered) is ApplyOutcome.CONFIGURED


async def test_what_is_rendered_anew_is_applied_however_often(world: World) -> None:
    for number in range(3 * BURST):
        assert await world.cluster.apply(config_map({"a": str(number)})) is not ApplyOutcome.UNCHANGED


async def test_what_has_not_changed_since_is_not_even_read(world: World) -> None:
    rendered = config_map({"a": "1"})
    await world.cluster.apply(rendered)
    requests = len(world.server.requests)
    world.cluster.cache.get = lambda ref: pytest.fail("it was read")  # type: ignore[method-assign]
    assert await world.cluster.apply(rendered) is ApplyOutcome.UNCHANGED
    assert len(world.server.requests) == requests


async def test_what_is_made_anew_after_each_deletion_is_deleted_slowly_in_the_end(world: World) -> None:
    ref = ObjectRef("v1", "ConfigMap", "llm", "coder-runtime")
    world.server.answer = lambda method, path, body: (200, {"status": "Success"})
    for _ in range(BURST):
        world.changed_by_another({"a": "1"})
        await world.cluster.delete(ref)

    world.changed_by_another({"a": "1"})
    with pytest.raises(ClusterError, match="ConfigMap llm/coder-runtime is made anew again and again"):
        await world.cluster.delete(ref)
    assert len(world.server.requests) == BURST

    world.clock.advance(SECONDS_EACH)
    await world.cluster.delete(ref)
    assert len(world.server.requests) == BURST + 1


async def test_what_was_gone_before_it_was_deleted_is_forgotten_and_no_fight(world: World) -> None:
    ref = ObjectRef("v1", "ConfigMap", "llm", "coder-runtime")
    world.server.answer = lambda method, path, body: (404, {"message": "not found"})
    for _ in range(2 * BURST):
        world.changed_by_another({"a": "1"})
        await world.cluster.delete(ref)
    assert await world.cluster.list_owned(KEY) == []


async def test_what_is_on_its_way_out_is_not_deleted_again(world: World) -> None:
    going = config_map({}, version="11")
    going["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    world.cluster.observe(CONFIG_MAP, going)
    for _ in range(2 * BURST):
        await world.cluster.delete(ObjectRef.of(going))
    assert world.server.requests == []


def service(version: int, *, generation: int = 1, **more: object) -> Manifest:
    meta = {"name": "coder", "namespace": "llm", "uid": "u1", "resourceVersion": str(version), "generation": generation}
    return SERVICE.whole({"metadata": meta, "spec": {"decode": {"replicas": generation}}}) | more


async def test_a_change_that_comes_with_the_answer_to_our_status_wakes_the_service(world: World) -> None:
    world.cluster.observe(SERVICE, service(10))
    keys = world.cluster.watch()
    assert await anext(keys) == KEY
    world.server.answer = lambda method, path, body: (200, service(12, generation=2, status=body["status"]))

    await world.cluster.patch_status(KEY, {"observedGeneration": 1})
    world.cluster.observe(SERVICE, service(11, generation=2))  # what the watch shows is not news any more

    assert await asyncio.wait_for(anext(keys), 5) == KEY
    found = await world.cluster.get_service(KEY)
    assert found is not None
    assert found["metadata"]["generation"] == 2


async def test_our_own_status_wakes_nobody(world: World) -> None:
    world.cluster.observe(SERVICE, service(10))
    keys = world.cluster.watch()
    assert await anext(keys) == KEY
    world.server.answer = lambda method, path, body: (200, service(11, status=body["status"]))

    await world.cluster.patch_status(KEY, {"observedGeneration": 1})

    waiting = asyncio.ensure_future(anext(keys))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()


def test_a_bucket_that_is_full_again_is_forgotten() -> None:
    clock = FakeClock()
    limit = RepairLimit(clock.time)
    ref = ObjectRef("v1", "ConfigMap", "llm", "coder-runtime")
    assert all(limit.take(ref) for _ in range(BURST))
    assert not limit.take(ref)
    clock.advance(BURST * SECONDS_EACH / 2)
    limit.prune()
    assert [limit.take(ref) for _ in range(BURST)].count(True) == BURST / 2
    clock.advance(BURST * SECONDS_EACH + 1)
    limit.prune()
    assert limit._buckets == {}
