"""The control plane's own API on a unix socket: what `kubectl` and the API server are on Kubernetes, much smaller."""

import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiohttp import web

from specserve_operator.api.conditions import ConditionType
from specserve_operator.api.pools import ScalingMode
from specserve_operator.api.validation import InvalidManifest, parse_service
from specserve_operator.cli.client import socket_path
from specserve_operator.cli.preflight import PreflightError, check_services
from specserve_operator.cluster.local import LocalCluster, LogNotFound
from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.core.conditions import FALSE, previous_condition
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.names import ANNOTATION_UPGRADE, Pool, pool_scaler_name
from specserve_operator.core.objects import Manifest, ServiceKey

SCALABLE_POOLS = ("prefill", "decode", "gateway")
_MAX_BODY_BYTES = 8 * 1024 * 1024
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NotFound(Exception):  # noqa: N818 - becomes status 404
    """What was asked for is not there."""


class BadRequest(Exception):  # noqa: N818 - becomes status 400
    """The request contradicts itself or the service."""


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Translates the errors of every layer below into a status and one message, in one place."""
    try:
        return await handler(request)
    except (InvalidManifest, PreflightError, BadRequest) as error:
        return web.json_response({"error": str(error)}, status=400)
    except (NotFound, LogNotFound) as error:
        return web.json_response({"error": str(error)}, status=404)
    except ClusterError as error:
        return web.json_response({"error": str(error)}, status=409)


class ControlPlaneApi:
    """Serves one local cluster."""

    def __init__(self, cluster: LocalCluster, config: OperatorConfig, *, on_shut_down: Callable[[], None]) -> None:
        self._cluster = cluster
        self._config = config
        self._on_shut_down = on_shut_down

    def application(self) -> web.Application:
        """The routes; `cli.client.Client` has one method for each."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=_MAX_BODY_BYTES)
        service = "/v1/services/{namespace}/{name}"
        app.add_routes(
            [
                web.get("/v1/info", self._info),
                web.get("/v1/objects/{kind}", self._list_objects),
                web.post("/v1/services", self._apply),
                web.delete(service, self._delete),
                web.post(f"{service}/scale", self._scale),
                web.post(f"{service}/upgrade", self._upgrade),
                web.get("/v1/pods/{namespace}/{name}/log", self._log),
                web.post("/v1/shutdown", self._shut_down),
            ]
        )
        return app

    @asynccontextmanager
    async def serve(self, state_dir: Path) -> AsyncIterator[None]:
        """Listens on the state directory's socket, for this user alone, until the block ends."""
        # A client that follows a log must not hold up the end.
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        path = socket_path(state_dir)
        try:
            await web.SockSite(runner, _private_socket(path)).start()
            yield
        finally:
            await runner.cleanup()
            _remove(path)

    async def apply(self, manifests: Sequence[Manifest]) -> list[dict[str, str]]:
        """Stores services. Nothing is stored unless all of them can run here.

        Raises `InvalidManifest` and `PreflightError`, which name the field or file.
        """
        services = [parse_service(manifest) for manifest in manifests]
        existing = [parse_service(m) for m in self._cluster.list_objects("SpeculativeService")]
        check_services(services, config=self._config, existing=existing)
        results = []
        for service, manifest in zip(services, manifests, strict=True):
            key = ServiceKey(service.metadata.namespace, service.metadata.name)
            results.append(_result(key, await self._cluster.put_service(manifest)))
        return results

    async def scale(self, key: ServiceKey, replicas: Mapping[str, int]) -> dict[str, str]:
        """Sets the replicas of pools. Raises `BadRequest` where another field decides them."""
        manifest = self._service(key)
        external = external_replicas(manifest, replicas)
        own = {pool: count for pool, count in replicas.items() if pool not in external}
        outcomes = set()
        if own:
            (result,) = await self.apply([with_replicas(manifest, own)])
            outcomes.add(ApplyOutcome(result["outcome"]))
        for pool, count in external.items():
            scaler = pool_scaler_name(key.name, Pool(pool))
            outcomes.add(await self._cluster.scale_pool(key.namespace, scaler, count))
        is_changed = outcomes - {ApplyOutcome.UNCHANGED}
        return _result(key, ApplyOutcome.CONFIGURED if is_changed else ApplyOutcome.UNCHANGED)

    async def upgrade(self, key: ServiceKey) -> dict[str, str]:
        """Asks for pods as this version makes them, where that would change any."""
        manifest = self._service(key)
        known = previous_condition(manifest.get("status") or {}, ConditionType.UPGRADE_AVAILABLE)
        if known is not None and known.status == FALSE:
            return _result(key, ApplyOutcome.UNCHANGED)
        annotations = (manifest["metadata"].get("annotations") or {}) | {
            ANNOTATION_UPGRADE: datetime.now(UTC).isoformat()
        }
        asking = {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}
        return _result(key, await self._cluster.put_service(asking))

    def _service(self, key: ServiceKey) -> Manifest:
        manifest = self._cluster.get_object("SpeculativeService", key.namespace, key.name)
        if manifest is None:
            raise NotFound(f"there is no service {key}")
        return manifest

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": version("specserve"), "pid": os.getpid()})

    async def _list_objects(self, request: web.Request) -> web.Response:
        items = self._cluster.list_objects(request.match_info["kind"], namespace=request.query.get("namespace"))
        return web.json_response({"items": list(items)})

    async def _apply(self, request: web.Request) -> web.Response:
        body = await _json_object(request)
        return web.json_response({"results": await self.apply(body.get("manifests", []))})

    async def _delete(self, request: web.Request) -> web.Response:
        key = ServiceKey(request.match_info["namespace"], request.match_info["name"])
        if not await self._cluster.delete_service(key):
            raise NotFound(f"there is no service {key}")
        wait_seconds = float(request.query.get("wait_seconds", "0"))
        gone = await self._cluster.wait_gone(key, timeout_seconds=wait_seconds) if wait_seconds > 0 else False
        return web.json_response({"gone": gone})

    async def _scale(self, request: web.Request) -> web.Response:
        key = ServiceKey(request.match_info["namespace"], request.match_info["name"])
        body = await _json_object(request)
        return web.json_response(await self.scale(key, body.get("replicas", {})))

    async def _upgrade(self, request: web.Request) -> web.Response:
        key = ServiceKey(request.match_info["namespace"], request.match_info["name"])
        return web.json_response(await self.upgrade(key))

    async def _log(self, request: web.Request) -> web.StreamResponse:
        namespace, pod = request.match_info["namespace"], request.match_info["name"]
        query = request.query
        container = query.get("container")
        tail_lines = int(query["tail"]) if "tail" in query else None
        if "follow" not in query:
            text = self._cluster.read_log(
                namespace, pod, container=container, previous="previous" in query, tail_lines=tail_lines
            )
            return web.Response(text=text)
        lines = self._cluster.follow_log(namespace, pod, container=container, tail_lines=tail_lines)
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        with suppress(ConnectionError):  # the reader has seen enough
            await response.prepare(request)
            async for line in lines:
                await response.write(line.encode())
        return response

    async def _shut_down(self, _: web.Request) -> web.Response:
        self._on_shut_down()
        return web.json_response({})


def _result(key: ServiceKey, outcome: ApplyOutcome) -> dict[str, str]:
    return {"namespace": key.namespace, "name": key.name, "outcome": outcome.value}


def external_replicas(service: Manifest, replicas: Mapping[str, int]) -> dict[str, int]:
    """Those of `replicas` whose pools have a PoolScaler to say so. Raises `BadRequest` outside of the spec's bounds."""
    found = {}
    for pool, count in replicas.items():
        scaling = (service["spec"].get(pool) or {}).get("scaling") or {} if pool in SCALABLE_POOLS else {}
        if scaling.get("mode") != ScalingMode.EXTERNAL:
            continue
        least, most = scaling.get("minReplicas", 1), scaling["maxReplicas"]
        if not least <= count <= most:
            raise BadRequest(f"spec.{pool}.scaling of service {service['metadata']['name']} allows {least} to {most}")
        found[pool] = count
    return found


def with_replicas(service: Manifest, replicas: Mapping[str, int]) -> Manifest:
    """The service with `spec.<pool>.replicas` set, as a new manifest. Raises `BadRequest`."""
    name, spec = service["metadata"]["name"], dict(service["spec"])
    for pool, count in replicas.items():
        if pool not in SCALABLE_POOLS:
            raise BadRequest(f"{pool} is no pool that can be scaled; choose one of {', '.join(SCALABLE_POOLS)}")
        if pool == "prefill" and spec.get("prefill") is None:
            raise BadRequest(f"service {name} has no prefill pool: its decode pods serve aggregated")
        current = spec.get(pool) or {}
        if current.get("scaling") is not None:
            raise BadRequest(
                f"spec.{pool}.scaling decides the replicas of service {name}: "
                "change its minReplicas and maxReplicas, or replace it by replicas"
            )
        spec[pool] = {**current, "replicas": count}
    return {**service, "spec": spec}


def _private_socket(path: str) -> socket.socket:
    """A socket with mode 0600 from its first moment. A stale one of a killed control plane is replaced."""
    _remove(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)
    return listener


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise BadRequest(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the request must be a JSON object")
    return body
