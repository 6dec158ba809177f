"""Requests to an API server: what is sent, and what becomes of its answers. The server is a real HTTP one."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from specserve_operator.cluster.kube.client import ApiError, ApiUnreachableError, KubeClient
from specserve_operator.cluster.kube.cluster import KubeCluster
from specserve_operator.cluster.kube.discovery import find_kinds
from specserve_operator.cluster.kube.events import EventRecorder
from specserve_operator.cluster.kube.health import WatchHealth
from specserve_operator.cluster.kube.kinds import POD_MONITOR, SERVICE, Kind
from specserve_operator.cluster.kube.secret import SecretStore
from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.constants import LABEL_SERVICE
from specserve_operator.core.objects import Event, EventType, Manifest, ObjectRef, ServiceKey
from specserve_operator.identity.keeper import CaConflictError, CaStoreError
from specserve_operator.probes import serving

CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ServiceKey("llm", "coder")
META = {"name": "coder-runtime", "namespace": "llm", "labels": {LABEL_SERVICE: "coder"}, "resourceVersion": "6"}


class Server:
    """Answers with what `answer` returns, a status and JSON, and remembers the requests.

    `is_empty`: there is no object that could be read.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.answer: Callable[[str, str, Any], tuple[int, Any]] = lambda method, path, body: (200, body)
        self.is_empty = False

    @property
    def writes(self) -> list[tuple[str, str, dict[str, str], Any]]:
        return [request for request in self.requests if request[0] != "GET"]

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        self.requests.append((request.method, request.path, dict(request.query), body))
        if self.is_empty and request.method == "GET":
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        status, answer = self.answer(request.method, request.path, body)
        return web.json_response(answer, status=status)


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with serving(app, "127.0.0.1", 0) as port:
        configuration = Configuration(host=f"http://127.0.0.1:{port}")
        async with KubeClient(configuration) as client:
            yield client


def config_map(data: dict[str, str], version: str = "") -> Manifest:
    meta: dict[str, Any] = {"name": "coder-runtime", "namespace": "llm", "labels": {LABEL_SERVICE: "coder"}}
    if version:
        meta["resourceVersion"] = version
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def cluster_of(client: KubeClient) -> KubeCluster:
    recorder = EventRecorder(client, now=lambda: NOW, reporter="test")
    return KubeCluster(client, recorder, WatchHealth(lambda: 0.0), kinds=(SERVICE, CONFIG_MAP))


@pytest.mark.parametrize(
    ("status", "retryable"), [(403, True), (409, True), (429, True), (500, True), (404, False), (422, False)]
)
async def test_a_refusal_says_what_the_api_server_said(
    server: Server, client: KubeClient, status: int, retryable: bool
) -> None:
    server.answer = lambda method, path, body: (status, {"kind": "Status", "message": "no way", "reason": "Because"})

    with pytest.raises(ApiError, match=r"^no way$") as caught:
        await client.get("/api/v1/pods")

    assert (caught.value.status, caught.value.reason, caught.value.retryable) == (status, "Because", retryable)


async def test_a_namespace_that_ends_takes_nothing_however_often_it_is_tried(
    server: Server, client: KubeClient
) -> None:
    details = {"causes": [{"reason": "NamespaceTerminating", "message": "namespace llm is being terminated"}]}
    server.answer = lambda method, path, body: (403, {"kind": "Status", "message": "no", "details": details})

    with pytest.raises(ApiError) as caught:
        await client.get("/api/v1/pods")

    assert not caught.value.retryable


async def test_an_answer_that_is_no_status_object_is_told_by_its_number(server: Server, client: KubeClient) -> None:
    server.answer = lambda method, path, body: (502, ["not", "a", "status"])

    with pytest.raises(ApiError, match="GET /api/v1/pods: HTTP status 502"):
        await client.get("/api/v1/pods")


async def test_no_answer_is_an_error_to_try_again_after() -> None:
    async with KubeClient(Configuration(host="http://127.0.0.1:1")) as client:
        with pytest.raises(ApiUnreachableError) as caught:
            await client.get("/api")

    assert caught.value.retryable


async def test_an_apply_is_a_server_side_apply_by_our_manager(server: Server, client: KubeClient) -> None:
    cluster = cluster_of(client)
    server.is_empty = True

    server.answer = lambda method, path, body: (201, config_map(body["data"], version="5"))
    assert await cluster.apply(config_map({"a": "1"})) is ApplyOutcome.CREATED

    ((method, path, query, body),) = server.writes
    assert (method, path) == ("PATCH", "/api/v1/namespaces/llm/configmaps/coder-runtime")
    assert query == {"fieldManager": "specserve", "force": "true"}
    assert body == config_map({"a": "1"})


async def test_what_was_applied_and_is_still_so_is_not_sent_again(server: Server, client: KubeClient) -> None:
    cluster = cluster_of(client)
    server.is_empty = True
    server.answer = lambda method, path, body: (201, config_map({"a": "written in another way"}, version="5"))
    await cluster.apply(config_map({"a": "1"}))

    assert await cluster.apply(config_map({"a": "1"})) is ApplyOutcome.UNCHANGED
    assert len(server.writes) == 1

    cluster.observe(CONFIG_MAP, config_map({"a": "somebody else's"}, version="6"))
    server.answer = lambda method, path, body: (200, config_map({"a": "written in another way"}, version="7"))
    assert await cluster.apply(config_map({"a": "1"})) is ApplyOutcome.CONFIGURED
    assert await cluster.apply(config_map({"a": "2"})) is ApplyOutcome.UNCHANGED  # the version stayed the same
    assert len(server.writes) == 3


async def test_an_object_that_is_not_ours_is_not_taken_over(server: Server, client: KubeClient) -> None:
    server.answer = lambda method, path, body: (200, {"metadata": {"name": "coder-runtime", "labels": {"team": "x"}}})

    with pytest.raises(ClusterError, match="ConfigMap llm/coder-runtime is there and does not belong") as caught:
        await cluster_of(client).apply(config_map({"a": "1"}))

    assert not caught.value.retryable
    assert server.writes == []


async def test_what_an_earlier_process_applied_is_not_sent_again(server: Server, client: KubeClient) -> None:
    cluster = cluster_of(client)
    cluster.observe(CONFIG_MAP, config_map({"a": "1", "b": "somebody else's"}, version="5"))

    assert await cluster.apply(config_map({"a": "1"})) is ApplyOutcome.UNCHANGED
    assert server.requests == []


async def test_what_an_apply_cannot_put_right_is_overwritten_first(server: Server, client: KubeClient) -> None:
    cluster = cluster_of(client)
    cluster.observe(CONFIG_MAP, config_map({"a": "somebody else's"}, version="5"))
    sent: list[str] = []

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        sent.append("overwrite" if isinstance(body, list) else "disown" if "data" not in body else "apply")
        if len(sent) == 1:
            return 422, {"kind": "Status", "message": "both are set"}
        managers = [{"manager": "specserve"}, {"manager": "specserve-repair"}]
        return 200, config_map({"a": "1"}, version="6") | {"metadata": META | {"managedFields": managers}}

    server.answer = answer
    assert await cluster.apply(config_map({"a": "1"})) is ApplyOutcome.CONFIGURED

    assert sent == ["apply", "overwrite", "disown", "apply"]
    assert server.requests[1][3] == [{"op": "add", "path": "/data", "value": {"a": "1"}}]
    assert server.requests[2][3]["metadata"]["managedFields"] == [{"manager": "specserve"}]


async def test_what_is_applied_can_be_read_at_once(server: Server, client: KubeClient) -> None:
    cluster = cluster_of(client)
    server.is_empty = True
    server.answer = lambda method, path, body: (201, config_map(body["data"], version="5"))

    await cluster.apply(config_map({"a": "1"}))

    assert [obj["data"] for obj in await cluster.list_owned(KEY)] == [{"a": "1"}]


async def test_a_delete_names_the_very_object_that_was_seen(server: Server, client: KubeClient) -> None:
    cluster = cluster_of(client)
    seen = config_map({}, version="5")
    seen["metadata"]["uid"] = "u-1"
    cluster.observe(CONFIG_MAP, seen)

    await cluster.delete(ObjectRef("v1", "ConfigMap", "llm", "coder-runtime"))

    method, _, _, body = server.requests[0]
    assert method == "DELETE"
    assert body["preconditions"] == {"uid": "u-1"}
    assert body["propagationPolicy"] == "Background"


@pytest.mark.parametrize("status", [404, 409])
async def test_what_is_gone_already_or_made_anew_is_deleted_without_error(
    server: Server, client: KubeClient, status: int
) -> None:
    server.answer = lambda method, path, body: (status, {"message": "no"})

    await cluster_of(client).delete(ObjectRef("v1", "ConfigMap", "llm", "coder-runtime"))


async def test_a_sweep_reads_every_page_and_drops_what_no_page_has(server: Server, client: KubeClient) -> None:
    cluster = cluster_of(client)
    cluster.observe(CONFIG_MAP, config_map({}, version="3"))
    first = config_map({}, version="4")
    first["metadata"]["name"] = "first"
    second = config_map({}, version="9")
    second["metadata"]["name"] = "second"
    pages = {
        "": {"metadata": {"resourceVersion": "10", "continue": "more"}, "items": [first]},
        "more": {"metadata": {"resourceVersion": "10"}, "items": [second]},
    }

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if "configmaps" not in path:
            return 200, {"metadata": {"resourceVersion": "10"}, "items": []}
        return 200, pages[server.requests[-1][2].get("continue", "")]

    server.answer = answer
    await cluster.sweep()

    assert sorted(obj["metadata"]["name"] for obj in await cluster.list_owned(KEY)) == ["first", "second"]


async def test_others_get_their_turn_while_a_page_is_taken_in(server: Server, client: KubeClient) -> None:
    cluster, objects = cluster_of(client), [config_map({}, version="4") for _ in range(500)]
    for number, obj in enumerate(objects):
        obj["metadata"]["name"] = f"map-{number}"

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        return 200, {"metadata": {"resourceVersion": "10"}, "items": objects if "configmaps" in path else []}

    server.answer = answer
    sizes = [0]
    sweeping = asyncio.ensure_future(cluster.sweep())
    while not sweeping.done():
        await asyncio.sleep(0)
        sizes.append(len(cluster.cache))

    assert sizes[-1] == 500
    assert max(after - before for before, after in itertools.pairwise(sizes)) <= 50


async def test_a_needed_kind_that_is_missing_is_named(server: Server, client: KubeClient) -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (200, {"resources": [{"name": "configmaps"}]}) if path == "/api/v1" else (404, {"message": "none"})

    server.answer = answer

    assert await find_kinds(client, (CONFIG_MAP, POD_MONITOR)) == (CONFIG_MAP,)
    with pytest.raises(ClusterError, match=r"no speculativeservices of specserve\.dev/v1alpha1: install the CRDs"):
        await find_kinds(client, (CONFIG_MAP, SERVICE))


class Recorder:
    """An `EventRecorder` with a clock that is set by hand."""

    def __init__(self, client: KubeClient) -> None:
        self.now = NOW
        self.recorder = EventRecorder(client, now=lambda: self.now, reporter="pod-1", quiet_seconds=10)

    async def say(self, message: str) -> None:
        service = {"apiVersion": SERVICE.api_version, "kind": SERVICE.name}
        meta = {"name": "coder", "namespace": "llm", "uid": "u-1"}
        await self.recorder.emit(service | {"metadata": meta}, Event(EventType.NORMAL, "PoolScaled", message))


async def test_the_same_event_again_is_one_object_with_a_count(server: Server, client: KubeClient) -> None:
    recorder = Recorder(client)
    await recorder.say("1 -> 2")
    await recorder.say("1 -> 2")  # held back
    recorder.now += timedelta(seconds=11)
    await recorder.say("1 -> 2")
    await recorder.say("2 -> 3")

    bodies = [body for _, _, _, body in server.requests]
    assert [body["count"] for body in bodies] == [1, 3, 1]
    assert bodies[0]["metadata"]["name"] == bodies[1]["metadata"]["name"] != bodies[2]["metadata"]["name"]
    assert bodies[1]["firstTimestamp"] == "2026-01-01T00:00:00Z"
    assert bodies[1]["lastTimestamp"] == "2026-01-01T00:00:11Z"
    assert bodies[0]["involvedObject"]["uid"] == "u-1"


async def test_a_namespace_that_is_going_away_takes_no_events_and_that_is_no_error(
    server: Server, client: KubeClient
) -> None:
    text = 'events "x" is forbidden: unable to create new content in namespace llm because it is being terminated'
    server.answer = lambda method, path, body: (403, {"message": text})

    await Recorder(client).say("1 -> 2")


async def test_the_authority_is_kept_in_one_key_of_the_secret(server: Server, client: KubeClient) -> None:
    store = SecretStore(client, namespace="specserve-system", name="ca")
    server.answer = lambda method, path, body: (200, {"metadata": {"resourceVersion": "8"}, "data": {}})

    empty = await store.load()
    assert (empty.data, empty.version) == (None, "8")
    assert await store.save(b"{}", version="8") == "8"

    assert server.requests[1][3] == {"metadata": {"resourceVersion": "8"}, "data": {"authority.json": "e30="}}


async def test_a_write_that_comes_too_late_is_a_conflict(server: Server, client: KubeClient) -> None:
    server.answer = lambda method, path, body: (409, {"message": "the object has been modified"})

    with pytest.raises(CaConflictError):
        await SecretStore(client, namespace="ns", name="ca").save(b"{}", version="8")


async def test_a_missing_secret_says_who_makes_it(server: Server, client: KubeClient) -> None:
    server.answer = lambda method, path, body: (404, {"message": "not found"})

    with pytest.raises(CaStoreError, match="Secret ns/ca is missing: the chart makes it"):
        await SecretStore(client, namespace="ns", name="ca").load()
