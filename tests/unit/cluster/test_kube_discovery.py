"""What the API server offers, and what statuses become for CRDs that are older than the operator."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration

from specserve_operator.api.crd import DEFINITIONS, resource_schema
from specserve_operator.cluster.kube.client import KubeClient
from specserve_operator.cluster.kube.discovery import Offer, find_offer
from specserve_operator.cluster.kube.kinds import OPTIONAL
from specserve_operator.cluster.kube.schema import missing_fields, prune_to
from specserve_operator.probes import serving

OWN = "apis/specserve.dev/v1alpha1"
MONITORS = "/apis/monitoring.coreos.com/v1"


class ApiServer:
    """One with our CRDs, of which fields can be taken away."""

    def __init__(self) -> None:
        self.schemas = {d.kind: dict(resource_schema(d)) for d in DEFINITIONS}
        self.digest = "1"
        self.has_monitors = False
        self.paths: list[str] = []

    def drop(self, kind: str, *path: str) -> None:
        """Takes a field out of a schema, which then has another digest."""
        self.digest += "1"
        self.schemas[kind] = without(self.schemas[kind], *path)

    async def handle(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        match request.path:
            case "/openapi/v3":
                shown = {OWN: {"serverRelativeURL": f"/openapi/v3/{OWN}?hash={self.digest}"}} if self.digest else {}
                return web.json_response({"paths": shown})
            case "/openapi/v3/apis/specserve.dev/v1alpha1":
                return web.json_response({"components": {"schemas": {k: self._schema(k) for k in self.schemas}}})
            case "/apis/monitoring.coreos.com/v1" if self.has_monitors:
                return web.json_response({"resources": [{"name": "podmonitors"}]})
        return web.json_response({"message": "none"}, status=404)

    def _schema(self, kind: str) -> Any:
        return self.schemas[kind] | {"x-kubernetes-group-version-kind": [{"kind": kind}]}


def without(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    name, *rest = path
    properties = dict(schema["properties"])
    if rest:
        properties[name] = without(properties[name], *rest)
    else:
        del properties[name]
    return schema | {"properties": properties}


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def client(api: ApiServer) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_get("/{path:.*}", api.handle)
    async with serving(app, "127.0.0.1", 0) as port, KubeClient(Configuration(host=f"http://127.0.0.1:{port}")) as kube:
        yield kube


async def test_crds_of_this_version_lack_nothing(api: ApiServer, client: KubeClient) -> None:
    offer = await find_offer(client)
    assert (offer.optional, offer.crds.problem, offer.crds.status_schemas) == ((), "", {})


async def test_schemas_are_read_again_only_where_they_are_others(api: ApiServer, client: KubeClient) -> None:
    first = await find_offer(client)
    again = await find_offer(client, first)
    assert again == first
    assert api.paths.count("/openapi/v3/apis/specserve.dev/v1alpha1") == 1
    assert len(api.paths) == 5

    api.drop("SpeculativeService", "spec", "budget")
    assert "SpeculativeService.spec.budget" in (await find_offer(client, again)).crds.problem


async def test_an_older_crd_is_named_with_what_it_lacks_until_it_is_upgraded(
    api: ApiServer, client: KubeClient
) -> None:
    current = api.schemas["SpeculativeService"]
    api.drop("SpeculativeService", "status", "kvTransfer")
    outdated = await find_offer(client)
    assert outdated.crds.problem == (
        "the installed CRDs are older than the operator and lack SpeculativeService.status.kvTransfer"
    )
    assert set(outdated.crds.status_schemas) == {"SpeculativeService"}

    api.schemas["SpeculativeService"], api.digest = current, "other"
    upgraded = await find_offer(client, outdated)
    assert (upgraded.crds.problem, upgraded.crds.status_schemas) == ("", {})


async def test_a_field_that_only_the_spec_lacks_leaves_statuses_whole(api: ApiServer, client: KubeClient) -> None:
    api.drop("SpeculativeService", "spec", "budget")
    assert (await find_offer(client)).crds.status_schemas == {}


async def test_crds_that_are_not_shown_yet_are_no_problem(api: ApiServer, client: KubeClient) -> None:
    api.digest = ""
    assert (await find_offer(client)).crds.problem == ""


async def test_an_optional_kind_that_comes_and_goes_is_noticed(api: ApiServer, client: KubeClient) -> None:
    before = await find_offer(client)
    api.has_monitors = True
    there = await find_offer(client, before)
    api.has_monitors = False
    gone = await find_offer(client, there)
    assert (before.optional, there.optional, gone.optional) == ((), OPTIONAL, ())
    assert gone == Offer((), before.crds)


SCHEMA = {
    "properties": {
        "known": {"properties": {"a": {"type": "string"}}},
        "list": {"items": {"properties": {"a": {"type": "string"}}}},
        "map": {"additionalProperties": {"properties": {"a": {"type": "string"}}}},
        "plain": {"type": "object"},
        "open": {"x-kubernetes-preserve-unknown-fields": True, "properties": {"a": {}}},
        "labels": {"type": "object", "additionalProperties": True},
    }
}


def test_only_what_a_schema_does_not_declare_is_left_out() -> None:
    inner = {"a": "1", "b": "2"}
    value = {"list": [inner], "map": {"x": inner}, "known": inner, "other": 1}
    kept = {"plain": inner, "open": inner, "labels": inner}
    assert (
        prune_to(SCHEMA, value | kept) == {"list": [{"a": "1"}], "map": {"x": {"a": "1"}}, "known": {"a": "1"}} | kept
    )


NAMES = st.sampled_from("abcd")
SCHEMAS = st.recursive(
    st.just({"type": "string"}),
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, min_size=1).map(lambda properties: {"properties": properties}),
        inner.map(lambda items: {"items": items}),
    ),
    max_leaves=12,
)


def filled(schema: dict[str, Any]) -> Any:
    """A value with every field of a schema."""
    if "properties" in schema:
        return {name: filled(inner) for name, inner in schema["properties"].items()}
    return [filled(schema["items"])] if "items" in schema else "x"


@given(SCHEMAS)
def test_a_value_of_the_same_schema_stays_whole(schema: dict[str, Any]) -> None:
    assert prune_to(schema, filled(schema)) == filled(schema)
    assert list(missing_fields(schema, schema)) == []


@given(st.data())
def test_what_was_pruned_has_no_field_that_is_missing(data: st.DataObject) -> None:
    wanted = data.draw(st.dictionaries(NAMES, SCHEMAS, min_size=1).map(lambda properties: {"properties": properties}))
    name = data.draw(st.sampled_from(sorted(wanted["properties"])))
    rest = {k: v for k, v in wanted["properties"].items() if k != name}
    found = {"properties": rest | {"known": {"type": "string"}}}
    assert list(missing_fields(wanted, found)) == [f".{name}"]
    assert prune_to(found, filled(wanted)) == filled({"properties": rest})
