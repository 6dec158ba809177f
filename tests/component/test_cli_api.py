"""Client and server over a real unix socket, with a cluster that only remembers."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from specserve_operator.cli.client import SOCKET_NAME, ApiError, Client, NotRunning
from specserve_operator.cli.server import ControlPlaneApi
from specserve_operator.cluster.local import LogNotFound
from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest, ServiceKey

T = TypeVar("T")
CONFIG = OperatorConfig("engine", "gateway", "1", local=True)


def make_service(name: str = "tiny", *, port: int = 28_080, **spec: Any) -> Manifest:
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"uri": "hf://a/b"}, "gateway": {"port": port}, **spec},
    }


class RememberingCluster:
    """The part of `LocalCluster` that the API uses."""

    def __init__(self) -> None:
        self.services: dict[str, Manifest] = {}
        self.refusal: ClusterError | None = None
        self.followed = asyncio.Event()

    def list_objects(self, kind: str, namespace: str | None = None) -> list[Manifest]:
        return list(self.services.values()) if kind == "SpeculativeService" and namespace != "empty" else []

    def get_object(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self.services.get(name)

    async def put_service(self, manifest: Manifest) -> ApplyOutcome:
        if self.refusal is not None:
            raise self.refusal
        name = manifest["metadata"]["name"]
        outcome = ApplyOutcome.CONFIGURED if name in self.services else ApplyOutcome.CREATED
        self.services[name] = manifest
        return outcome

    async def delete_service(self, key: ServiceKey) -> bool:
        return self.services.pop(key.name, None) is not None

    async def wait_gone(self, key: ServiceKey, *, timeout_seconds: float) -> bool:
        return timeout_seconds > 1

    def read_log(self, namespace: str, pod: str, **options: Any) -> str:
        if pod != "pod":
            raise LogNotFound(f"no pod {pod}")
        return f"{options['container']} {options['previous']} {options['tail_lines']}\nend\n"

    async def follow_log(self, namespace: str, pod: str, **options: Any) -> AsyncIterator[str]:
        yield "first\n"
        await self.followed.wait()
        yield "second\n"


class World:
    def __init__(self, state_dir: Path) -> None:
        self.cluster = RememberingCluster()
        self.shut_downs = 0
        self.api = ControlPlaneApi(self.cluster, CONFIG, on_shut_down=self._count)  # type: ignore[arg-type]
        self.state_dir = state_dir
        self.client = Client(state_dir)

    def _count(self) -> None:
        self.shut_downs += 1


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with world.api.serve(tmp_path):
        yield world


async def call(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """The client blocks, as a command may."""
    return await asyncio.to_thread(function, *args, **options)


async def test_only_this_user_may_connect(world: World) -> None:
    assert os.stat(world.state_dir / SOCKET_NAME).st_mode & 0o777 == 0o600
    assert (await call(world.client.info))["pid"] == os.getpid()


async def test_the_socket_goes_with_the_server_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path)
    (tmp_path / SOCKET_NAME).write_text("left by a killed control plane")
    async with world.api.serve(tmp_path):
        assert await call(world.client.is_running)
    assert not (tmp_path / SOCKET_NAME).exists()
    with pytest.raises(NotRunning, match="specserve up"):
        await call(world.client.info)


async def test_services_are_applied_listed_and_deleted(world: World) -> None:
    created = {"namespace": "default", "name": "tiny", "outcome": "created"}
    assert await call(world.client.apply, [make_service()]) == [created]
    assert [s["metadata"]["name"] for s in await call(world.client.list_objects, "SpeculativeService")] == ["tiny"]
    assert await call(world.client.list_objects, "SpeculativeService", namespace="empty") == []
    key = ServiceKey("default", "tiny")
    assert await call(world.client.delete, key, wait_seconds=2)
    with pytest.raises(ApiError, match="there is no service default/tiny") as caught:
        await call(world.client.delete, key, wait_seconds=2)
    assert caught.value.status == 404


async def test_a_deletion_that_takes_too_long_says_so(world: World) -> None:
    await call(world.client.apply, [make_service()])
    assert not await call(world.client.delete, ServiceKey("default", "tiny"), wait_seconds=0.5)


async def test_if_one_of_several_services_is_refused_none_is_stored(world: World) -> None:
    bad = make_service("bad", decode={"replicas": "two"})
    with pytest.raises(ApiError, match=r"spec\.decode\.replicas") as caught:
        await call(world.client.apply, [make_service(), bad])
    assert caught.value.status == 400
    assert world.cluster.services == {}


async def test_what_cannot_run_on_this_machine_is_refused(world: World) -> None:
    with pytest.raises(ApiError, match="there is no folder /nowhere") as caught:
        await call(world.client.apply, [make_service() | {"spec": {"model": {"uri": "file:///nowhere"}}}])
    assert caught.value.status == 400
    await call(world.client.apply, [make_service()])
    with pytest.raises(ApiError, match="port 28080 is the gateway of service default/tiny"):
        await call(world.client.apply, [make_service("second")])


async def test_a_refusal_of_the_cluster_reaches_the_user(world: World) -> None:
    world.cluster.refusal = ClusterError("no room")
    with pytest.raises(ApiError, match="no room") as caught:
        await call(world.client.apply, [make_service()])
    assert caught.value.status == 409


async def test_scaling_sets_replicas_and_is_checked_like_any_change(world: World) -> None:
    await call(world.client.apply, [make_service(prefill={"replicas": 1})])
    key = ServiceKey("default", "tiny")
    assert (await call(world.client.scale, key, {"decode": 3, "prefill": 2}))["outcome"] == "configured"
    spec = world.cluster.services["tiny"]["spec"]
    assert (spec["decode"], spec["prefill"]) == ({"replicas": 3}, {"replicas": 2})
    with pytest.raises(ApiError, match="scaled to zero together"):
        await call(world.client.scale, key, {"decode": 0})
    with pytest.raises(ApiError, match="there is no service default/none"):
        await call(world.client.scale, ServiceKey("default", "none"), {"decode": 1})


async def test_logs_come_with_their_options_and_missing_ones_are_named(world: World) -> None:
    def log(pod: str, **options: Any) -> list[str]:
        return list(world.client.log_lines("default", pod, **options))

    assert await call(log, "pod", container="engine", previous=True, tail_lines=3) == ["engine True 3\n", "end\n"]
    with pytest.raises(ApiError, match="no pod x"):
        await call(log, "x")


async def test_a_followed_log_arrives_line_by_line(world: World) -> None:
    lines, first_came = list[str](), threading.Event()

    def follow() -> None:
        for line in world.client.log_lines("default", "pod", follow=True):
            lines.append(line)
            first_came.set()

    reader = asyncio.create_task(asyncio.to_thread(follow))
    assert await call(first_came.wait, 5)
    assert lines == ["first\n"]
    world.cluster.followed.set()
    await asyncio.wait_for(reader, 5)
    assert lines == ["first\n", "second\n"]


async def test_a_reader_that_follows_a_log_does_not_hold_up_the_end(tmp_path: Path) -> None:
    world, came = World(tmp_path), threading.Event()

    def follow() -> None:
        try:
            for _ in world.client.log_lines("default", "pod", follow=True):
                came.set()
        except Exception:
            return  # cut off, as it should be

    async with asyncio.timeout(10):
        async with world.api.serve(tmp_path):
            reader = asyncio.create_task(asyncio.to_thread(follow))
            assert await call(came.wait, 5)
        await reader


async def test_shutting_down_is_answered_before_it_happens(world: World) -> None:
    await call(world.client.shut_down)
    assert world.shut_downs == 1
