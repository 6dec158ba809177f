"""What kopf's connections tell beside what its handlers see."""

from collections.abc import AsyncIterator

import kopf
import pytest
from aiohttp import web

from specserve_operator.cluster.kube.kinds import POD, SERVICE, Kind
from specserve_operator.handlers import NoMemories, kopf_settings, open_session
from specserve_operator.probes import serving

SERVER = "http://127.0.0.1:1"


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """Has one pod on every page of a list that does not end."""

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/api/v1":
            return web.json_response({"kind": "APIResourceList", "resources": []})
        return web.json_response(
            {"items": [{"metadata": {"name": "a"}}], "metadata": {"resourceVersion": "17", "continue": "more"}}
        )

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    async with serving(app, "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/api/v1/pods", [(POD, None, 17)]),
        ("/api/v1/namespaces/llm/pods", [(POD, "llm", 17)]),
        ("/apis/specserve.dev/v1alpha1/speculativeservices", [(SERVICE, None, 17)]),
    ],
)
async def test_of_a_list_kopf_sees_the_version_alone_from_which_it_is_to_watch(
    server: str, path: str, told: list[tuple[Kind, str | None, int]]
) -> None:
    begun: list[tuple[Kind, str | None, int]] = []

    def on_watch(kind: Kind, namespace: str | None, version: int) -> int:
        begun.append((kind, namespace, version))
        return version - 5

    info = kopf.ConnectionInfo(server=server, token="t")
    session = open_session(info, [POD, SERVICE], on_watch).aiohttp_session
    async with session, session.get(server + path, params={"limit": "1"}) as answer:
        assert await answer.json() == {"items": [], "metadata": {"resourceVersion": "12"}}
        assert answer.request_info.headers["Authorization"] == "Bearer t"
    assert begun == told


async def test_kopf_keeps_nothing_of_the_objects_that_it_shows() -> None:
    memories = NoMemories()
    for uid in ("u-1", "u-2"):
        await memories.recall({"metadata": {"uid": uid}}, noticed_by_listing=False)
    assert list(memories.iter_all_memories()) == []


@pytest.mark.parametrize("path", ["/api/v1", "/api/v1/secrets"])
async def test_other_answers_are_left_as_they_are(server: str, path: str) -> None:
    info = kopf.ConnectionInfo(server=server, token="t")
    session = open_session(info, [POD, SERVICE], lambda *watch: pytest.fail("no watch begins")).aiohttp_session
    async with session, session.get(server + path) as answer:
        assert set(await answer.json()) & {"items", "resources"}
        assert len((await answer.json()).get("items", ())) in (0, 1)


def test_kopf_asks_for_no_more_of_a_list_than_it_must() -> None:
    assert kopf_settings([POD], pod_name="us").watching.chunk_size == 1


async def test_credentials_that_were_refused_are_known_again() -> None:
    """By this, kopf ends in place of asking for ever."""
    infos = [kopf.ConnectionInfo(server=SERVER, token=token) for token in ("old", "old", "new")]
    first, again, other = (open_session(info, [], lambda kind, namespace, version: version) for info in infos)
    for opened in (first, again, other):
        await opened.aiohttp_session.close()
    assert first == again
    assert first != other
