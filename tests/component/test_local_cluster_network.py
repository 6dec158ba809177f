"""Names and ports of the local cluster: hosts files, the forwarder, conflicts, the pod API."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from specserve_operator.cluster.local import LocalCluster
from specserve_operator.cluster.local.forwarder import Forwarder
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.core.objects import ObjectRef
from tests.component.local_cluster_support import (
    OPTIONS,
    deployment,
    eventually,
    first_status,
    free_port,
    http_server,
    pod_reader_role,
    pods,
    ready_pods,
    reasons,
    service,
    shell,
)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(tmp_path / "state", OPTIONS) as running:
        yield running


def addresses(cluster: LocalCluster, name: str) -> list[str]:
    path = cluster.state.hosts / "default" / name
    return path.read_text().split() if path.exists() else []


async def test_headless_name_lists_ready_pods_only(cluster: LocalCluster) -> None:
    ready = {"exec": {"command": ["test", "-e", "ready"]}, "periodSeconds": 0.05, "failureThreshold": 1}
    await cluster.apply(service("peers", "a"))
    await cluster.apply(deployment("a", shell("sleep 99", readinessProbe=ready), replicas=2))
    await eventually(lambda: len([p for p in pods(cluster, "a") if p.get("status", {}).get("podIP")]) == 2)
    assert addresses(cluster, "peers") == []
    first, second = pods(cluster, "a")
    for pod in (first, second):
        (cluster.state.pod("default", pod["metadata"]["name"]) / "work" / "ready").touch()
    both = {first["status"]["podIP"], second["status"]["podIP"]}
    await eventually(lambda: set(addresses(cluster, "peers")) == both)
    for name in ("peers.default", "peers.default.svc", "peers.default.svc.cluster.local"):
        assert set(addresses(cluster, name)) == both
    (cluster.state.pod("default", first["metadata"]["name"]) / "work" / "ready").unlink()
    await eventually(lambda: addresses(cluster, "peers") == [second["status"]["podIP"]])
    await cluster.delete(ObjectRef("v1", "Service", "default", "peers"))
    await eventually(lambda: not (cluster.state.hosts / "default" / "peers").exists())


async def get(port: int) -> str:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        return await response.text()


async def test_service_port_leads_to_ready_pods_in_turn_and_refuses_without(cluster: LocalCluster) -> None:
    port = free_port()
    await cluster.apply(service("web", "a", port=port))
    assert cluster.endpoint_of("default", "web") == f"http://127.0.0.1:{port}"
    assert cluster.endpoint_of("default", "no") is None
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(port)
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 0.05}
    await cluster.apply(deployment("a", http_server("$(POD_IP)", readinessProbe=probe), replicas=2))
    running = await ready_pods(cluster, "a", 2)
    assert addresses(cluster, "web") == ["127.0.0.1"]

    async def answers() -> Counter[str] | None:
        try:
            found = Counter([await get(port) for _ in range(6)])
        except aiohttp.ClientConnectorError:
            return None  # the listener has not heard of the pods yet
        return found if len(found) == 2 else None

    assert await eventually(answers) == {pod["status"]["podIP"]: 3 for pod in running}
    await cluster.apply(deployment("a", http_server("$(POD_IP)", readinessProbe=probe), replicas=0))

    async def refused() -> bool:
        try:
            await get(port)
        except aiohttp.ClientConnectorError:
            return True
        except aiohttp.ClientError:
            return False
        return False

    await eventually(refused)


async def test_port_in_use_is_refused_with_the_field_and_the_owner(cluster: LocalCluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError) as caught:
            await cluster.apply(service("tiny-gateway", "a", port=port))
    text = str(caught.value)
    assert f"port {port} of 127.0.0.1 is in use by" in text
    assert "spec.gateway.port" in text
    assert caught.value.retryable
    assert cluster.list_objects("Service") == []
    await cluster.apply(service("tiny-gateway", "a", port=port))


async def test_two_services_cannot_have_one_port_until_the_first_is_gone(cluster: LocalCluster) -> None:
    port = free_port()
    await cluster.apply(service("one-gateway", "a", port=port))
    with pytest.raises(ClusterError, match=f"port {port} of 127.0.0.1 belongs to Service default/one-gateway"):
        await cluster.apply(service("two-gateway", "a", port=port))
    await cluster.delete(ObjectRef("v1", "Service", "default", "one-gateway"))
    await cluster.apply(service("two-gateway", "a", port=port))
    assert cluster.endpoint_of("default", "two-gateway") == f"http://127.0.0.1:{port}"


async def test_container_port_held_by_a_stranger_is_a_reason_to_wait(cluster: LocalCluster) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = [{"name": "http", "containerPort": port}]
        await cluster.apply(deployment("a", shell("sleep 99", ports=ports)))
        waiting = await eventually(
            lambda: "message" in (w := first_status(cluster, "a").get("state", {}).get("waiting", {})) and w
        )
        assert waiting["reason"] == "CreateContainerConfigError"
        assert f"container port http: port {port} of 127.77." in waiting["message"]
        assert "is in use by" in waiting["message"]
    await ready_pods(cluster, "a")
    assert first_status(cluster, "a")["restartCount"] == 0
    assert "Failed" in reasons(cluster)


async def test_address_whose_port_a_stranger_holds_goes_to_no_pod(cluster: LocalCluster) -> None:
    await cluster.apply(deployment("a", shell("sleep 99")))
    (first,) = await ready_pods(cluster, "a")
    prefix, _, host = first["status"]["podIP"].rpartition(".")
    with socket.socket() as taken:
        taken.bind((f"{prefix}.{int(host) + 1}", 0))
        taken.listen()
        ports = [{"name": "http", "containerPort": taken.getsockname()[1]}]
        await cluster.apply(deployment("b", shell("sleep 99", ports=ports)))
        (second,) = await ready_pods(cluster, "b")
    assert second["status"]["podIP"] == f"{prefix}.{int(host) + 2}"


async def forwarded(handler: Any) -> tuple[Forwarder, asyncio.Server, int]:
    backend = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = free_port()
    forwarder = Forwarder("127.0.0.1", port)
    forwarder.set_backends([("127.0.0.1", backend.sockets[0].getsockname()[1])])
    return forwarder, backend, port


async def test_forwarder_keeps_every_byte_and_half_closed_connections() -> None:
    async def answer_after_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(data[::-1])
        writer.close()

    forwarder, backend, port = await forwarded(answer_after_the_end)
    payload = bytes(range(256)) * 40_000
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(payload)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 10) == payload[::-1]
    writer.close()
    await writer.wait_closed()
    await forwarder.close()
    backend.close()


async def test_forwarder_reads_no_more_than_the_other_side_takes() -> None:
    sent = 0
    stop = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        try:
            while not stop.is_set():
                writer.write(bytes(65536))
                await writer.drain()
                sent += 65536
        except ConnectionError:
            return

    forwarder, backend, port = await forwarded(flood)
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    before = -1
    while sent != before:
        before = sent
        await asyncio.sleep(0.2)
    assert 0 < sent < 64 * 1024 * 1024
    stop.set()
    writer.transport.abort()
    await forwarder.close()
    backend.close()


async def test_forwarder_goes_past_a_backend_that_is_gone() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    forwarder, backend, port = await forwarded(answer)
    alive = ("127.0.0.1", backend.sockets[0].getsockname()[1])
    forwarder.set_backends([("127.0.0.1", free_port()), alive])
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 5) == b"hello"
        writer.close()
    forwarder.set_backends([("127.0.0.1", free_port())])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await forwarder.close()
    backend.close()


async def test_pod_api_serves_whom_a_role_allows(cluster: LocalCluster) -> None:
    await cluster.apply(deployment("a", shell("sleep 99"), serviceAccountName="reader"))
    (pod,) = await ready_pods(cluster, "a")
    folder = cluster.state.pod("default", pod["metadata"]["name"])
    config = json.loads((folder / "kubeconfig").read_text())
    server = config["clusters"][0]["cluster"]["server"]
    url = f"{server}/api/v1/namespaces/default/pods"
    token = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
    async with aiohttp.ClientSession() as session:

        async def status_of(url: str, **headers: str) -> tuple[int, Any]:
            async with session.get(url, headers=headers) as response:
                return response.status, await response.json()

        assert (await status_of(url))[0] == 401
        assert (await status_of(url, Authorization="Bearer guess"))[0] == 401
        code, refusal = await status_of(url, **token)
        assert (code, refusal["reason"]) == (403, "Forbidden")
        assert 'cannot list resource "pods"' in refusal["message"]
        for obj in pod_reader_role("reader"):
            await cluster.apply(obj)
        code, listed = await status_of(url + "?labelSelector=app%3Da", **token)
        assert (code, [p["metadata"]["name"] for p in listed["items"]]) == (200, [pod["metadata"]["name"]])
        assert (await status_of(url + "?labelSelector=app%3Db", **token))[1]["items"] == []
        assert (await status_of(f"{url}/{pod['metadata']['name']}", **token))[1]["spec"] == pod["spec"]
        assert (await status_of(f"{url}/none", **token))[0] == 404
        assert (await status_of(f"{server}/api/v1/pods", **token))[0] == 403
        assert (await status_of(f"{server}/api/v1/nodes", **token))[0] == 404
        assert (await status_of(url + "?watch=1&resourceVersion=-1", **token))[0] == 410
        version = listed["metadata"]["resourceVersion"]
        watch_url = f"{url}?watch=1&labelSelector=app%3Da&resourceVersion={version}"
        async with session.get(watch_url, headers=token) as stream:
            await cluster.apply(deployment("a", shell("sleep 99"), serviceAccountName="reader", replicas=0))
            seen = []
            async for line in stream.content:
                seen.append(json.loads(line))
                if seen[-1]["type"] == "DELETED":
                    break
    assert seen[0]["type"] == "MODIFIED"
    assert "deletionTimestamp" in seen[0]["object"]["metadata"]
    versions = [int(change["object"]["metadata"]["resourceVersion"]) for change in seen]
    assert versions == sorted(versions)
    assert versions[0] > int(version)
