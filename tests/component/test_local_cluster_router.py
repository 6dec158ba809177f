"""The real gateway finds decode pods through the local pod API, as it does through Kubernetes' own."""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from specserve_operator.cluster.local import LocalCluster
from specserve_operator.core.launch import GatewayLaunch
from specserve_operator.core.names import Pool, selector
from specserve_operator.render.gateway import render_gateway_pod
from tests.component.local_cluster_support import (
    OPTIONS,
    POD_IP,
    Manifest,
    container,
    deployment,
    eventually,
    free_port,
    log_of,
    pod_reader_role,
    pods,
    python,
    ready_pods,
    service,
)

# A decode pod as the router sees one: healthy, and answers completions with its own address, or as the prompt says.
DECODE = """
import http.server, json, os, sys, time
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
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        if prompt == "error":
            return self.answer(500, {"error": {}})
        if prompt == "slow":
            open("working", "a").close()
            time.sleep(3)
        self.answer(200, {"object": "text_completion", "model": "m", "choices": [{"index": 0, "text": sys.argv[1]}]})
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""
# Whole seconds: the router reads pods strictly, and goes without discovery for a minute if it cannot.
PROBE = {"periodSeconds": 1, "failureThreshold": 1}
ROUTER_URL = re.compile(r"vllm-router, pid \d+, listens on (127\.0\.0\.1:\d+)")


def decode(replicas: int) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": 8000}]
    probe = {**PROBE, "httpGet": {"path": "/ready", "port": "http"}}
    engine = python(DECODE, "$(POD_IP)", env=[POD_IP], ports=ports, readinessProbe=probe)
    return deployment("decode", engine, replicas=replicas, pod_labels=selector("tiny", Pool.DECODE))


def gateway() -> dict[str, Any]:
    launch = GatewayLaunch(
        service="tiny", namespace="default", image="", drain_timeout_seconds=1, template=None, local=True
    )
    rendered = render_gateway_pod(launch)["containers"][0]
    fields = {name: rendered[name] for name in ("args", "env", "ports")}
    probe = {**PROBE, "httpGet": {"path": "/readiness", "port": "http"}}
    guard = container(*rendered["command"], name="gateway", readinessProbe=probe, **fields)
    return deployment("gateway", guard, serviceAccountName="gateway")


class Client:
    """Talks to the gateway at its Service port; and past the guard to the router, as nobody outside its pod can."""

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession, port: int) -> None:
        self._cluster = cluster
        self._session = session
        self.url = f"http://127.0.0.1:{port}"

    @property
    def router_url(self) -> str | None:
        found = [ROUTER_URL.search(log_of(self._cluster, pod)) for pod in pods(self._cluster, "gateway")]
        return f"http://{found[0][1]}" if found and found[0] else None

    async def workers(self) -> set[str]:
        if (router := self.router_url) is None:
            return set()
        try:
            async with self._session.get(f"{router}/list_workers") as response:
                return {url.removeprefix("http://").removesuffix(":8000") for url in (await response.json())["urls"]}
        except (aiohttp.ClientError, json.JSONDecodeError):
            return set()

    async def is_served(self) -> bool:
        try:
            return await self.send("GET", URL(f"{self.url}/readiness")) == 200
        except aiohttp.ClientError:
            return False

    async def send(self, method: str, url: URL, **options: Any) -> int:
        """The status."""
        async with self._session.request(method, url, **options) as response:
            return response.status

    async def knows(self, expected: set[str], *, timeout_seconds: float = 15.0) -> None:
        """Waits until these are the pods that the gateway sends requests to."""

        async def equal() -> bool:
            return await self.workers() == expected

        await eventually(equal, timeout_seconds=timeout_seconds)

    async def ask(self, prompt: str) -> tuple[int, str]:
        """(status, address of the pod that answered)"""
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
            answer = await response.json()
            return response.status, answer["choices"][0]["text"] if response.status == 200 else ""

    async def answers(self, count: int) -> Counter[str]:
        texts: Counter[str] = Counter()
        for _ in range(count):
            status, text = await self.ask("x")
            assert status == 200
            texts[text] += 1
        return texts


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(tmp_path / "state", OPTIONS) as running:
        yield running


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    """A gateway that knows two decode pods."""
    port = free_port()
    for obj in (*pod_reader_role("gateway"), service("tiny-gateway", "gateway", port=port), decode(2), gateway()):
        await cluster.apply(obj)
    async with aiohttp.ClientSession() as session:
        client = Client(cluster, session, port)
        await eventually(client.is_served, timeout_seconds=40)
        await client.knows(addresses(await ready_pods(cluster, "decode", 2)), timeout_seconds=40)
        yield client


def addresses(found: list[Manifest]) -> set[str]:
    return {pod["status"]["podIP"] for pod in found}


def work_folder(cluster: LocalCluster, pod: Manifest) -> Path:
    return cluster.state.pod("default", pod["metadata"]["name"]) / "work"


def kill(pod: Manifest) -> None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            command = (entry / "cmdline").read_bytes().split(b"\0") if (entry / "cmdline").exists() else []
            if pod["status"]["podIP"].encode() in command:
                os.kill(int(entry.name), signal.SIGKILL)


async def test_router_follows_pods_as_they_come_drain_and_go(cluster: LocalCluster, client: Client) -> None:
    draining, staying = pods(cluster, "decode")
    assert set(await client.answers(8)) == addresses([draining, staying])
    switch = work_folder(cluster, draining) / "draining"
    switch.touch()
    await client.knows(addresses([staying]))
    assert set(await client.answers(4)) == addresses([staying])
    switch.unlink()
    await client.knows(addresses([draining, staying]))
    await cluster.apply(decode(1))
    await eventually(lambda: len(pods(cluster, "decode")) == 1)
    (left,) = pods(cluster, "decode")
    await client.knows(addresses([left]))
    results = await asyncio.gather(client.answers(4), client.answers(4))
    assert sum(results, Counter()) == {left["status"]["podIP"]: 8}


async def test_killing_a_pod_costs_no_request_that_has_no_answer_yet(cluster: LocalCluster, client: Client) -> None:
    killed, staying = pods(cluster, "decode")
    waiting = [asyncio.create_task(client.ask("slow")) for _ in range(8)]
    await eventually(lambda: all((work_folder(cluster, pod) / "working").exists() for pod in (killed, staying)))
    kill(killed)
    later = [asyncio.create_task(client.ask("x")) for _ in range(8)]
    answers = await asyncio.gather(*waiting, *later)
    assert Counter(status for status, _ in answers) == {200: 16}
    await client.knows(addresses([killed, staying]))
    assert set(await client.answers(4)) == addresses([killed, staying])


async def test_requests_that_fail_take_no_pod_from_the_others(cluster: LocalCluster, client: Client) -> None:
    failed = await asyncio.gather(*(client.ask("error") for _ in range(24)))
    assert Counter(status for status, _ in failed) == {500: 24}
    assert set(await client.answers(8)) == addresses(pods(cluster, "decode"))


async def test_clients_cannot_manage_the_router_nor_reach_more_of_pods_than_the_api(
    cluster: LocalCluster, client: Client
) -> None:
    workers = await client.workers()
    assert workers == addresses(pods(cluster, "decode"))
    requests = [
        ("POST", "/add_worker?url=http://127.9.9.9:8000"),
        ("POST", f"/remove_worker?url=http://{min(workers)}:8000"),
        ("DELETE", f"/workers/http:%2F%2F{min(workers)}:8000"),
        ("POST", "/workers"),
        ("GET", "/workers"),
        ("GET", "/list_workers"),
        ("GET", "/v1/%2e%2e/list_workers"),
        ("POST", "/flush_cache"),
        ("GET", "/get_server_info"),
        ("GET", "/drain"),
        ("GET", "/metrics"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/load_lora_adapter/"),
    ]
    answers = {}
    for method, path in requests:
        body = {"url": "http://127.9.9.9:8000"} if method == "POST" else None
        answers[method, path] = await client.send(method, URL(f"{client.url}{path}", encoded=True), json=body)
    assert answers == dict.fromkeys(requests, 404)
    assert await client.workers() == workers
    assert set(await client.answers(4)) == workers
