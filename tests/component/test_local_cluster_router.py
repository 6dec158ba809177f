"""The real gateway finds decode pods through the local pod API, as it does through Kubernetes' own."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from specserve_operator.cluster.local import LocalCluster
from tests.component.local_cluster_support import (
    OPTIONS,
    POD_IP,
    container,
    deployment,
    eventually,
    free_port,
    pod_reader_role,
    pods,
    python,
    ready_pods,
    service,
)

# A decode pod as the router sees one: healthy, and answers completions with its own address.
DECODE = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        ready = self.path != "/ready" or not os.path.exists("draining")
        self.answer(200 if ready else 503, {"data": [{"id": "m"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, {"object": "text_completion", "model": "m", "choices": [{"index": 0, "text": sys.argv[1]}]})
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""
# Whole seconds: the router reads pods strictly, and goes without discovery for a minute if it cannot.
PROBE = {"periodSeconds": 1, "failureThreshold": 1}


def decode(replicas: int) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": 8000}]
    probe = {**PROBE, "httpGet": {"path": "/ready", "port": "http"}}
    return deployment(
        "decode", python(DECODE, "$(POD_IP)", env=[POD_IP], ports=ports, readinessProbe=probe), replicas=replicas
    )


def gateway() -> dict[str, Any]:
    arguments = [
        *("--service-discovery", "--selector", "app=decode"),
        *("--service-discovery-port", "8000", "--service-discovery-namespace", "default"),
        *("--host", "$(POD_IP)", "--port", "8000", "--prometheus-host", "$(POD_IP)", "--policy", "round_robin"),
    ]
    ports = [{"name": "http", "containerPort": 8000}]
    probe = {**PROBE, "httpGet": {"path": "/readiness", "port": "http"}}
    router = container("vllm-router", *arguments, name="gateway", env=[POD_IP], ports=ports, readinessProbe=probe)
    return deployment("gateway", router, serviceAccountName="gateway")


class Client:
    """Talks to the gateway at its Service port."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{port}"

    async def workers(self) -> set[str]:
        try:
            async with self._session.get(f"{self._url}/list_workers") as response:
                return {url.removeprefix("http://").removesuffix(":8000") for url in (await response.json())["urls"]}
        except (aiohttp.ClientError, json.JSONDecodeError):
            return set()

    async def answers(self, count: int) -> Counter[str]:
        texts: Counter[str] = Counter()
        for _ in range(count):
            body = {"model": "m", "prompt": "x", "max_tokens": 1}
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                assert response.status == 200
                texts[(await response.json())["choices"][0]["text"]] += 1
        return texts


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(tmp_path / "state", OPTIONS) as running:
        yield running


async def test_router_follows_pods_as_they_come_drain_and_go(cluster: LocalCluster) -> None:
    port = free_port()
    for obj in (*pod_reader_role("gateway"), service("tiny-gateway", "gateway", port=port), decode(2), gateway()):
        await cluster.apply(obj)
    running = await ready_pods(cluster, "decode", 2)
    addresses = {pod["status"]["podIP"] for pod in running}
    async with aiohttp.ClientSession() as session:
        client = Client(session, port)

        async def knows(expected: set[str]) -> bool:
            return await client.workers() == expected

        await eventually(lambda: knows(addresses), timeout_seconds=40)
        assert set(await client.answers(8)) == addresses
        draining, staying = running
        switch = cluster.state.pod("default", draining["metadata"]["name"]) / "work" / "draining"
        switch.touch()
        await eventually(lambda: knows({staying["status"]["podIP"]}))
        assert set(await client.answers(4)) == {staying["status"]["podIP"]}
        switch.unlink()
        await eventually(lambda: knows(addresses))
        await cluster.apply(decode(1))
        await eventually(lambda: len(pods(cluster, "decode")) == 1)
        (left,) = pods(cluster, "decode")
        await eventually(lambda: knows({left["status"]["podIP"]}))
        results = await asyncio.gather(client.answers(4), client.answers(4))
        assert sum(results, Counter()) == {left["status"]["podIP"]: 8}
