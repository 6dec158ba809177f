"""The part of the Kubernetes API that a pod may need: reading pods, for service discovery.

Lists and watches pods of one namespace, with label selectors, for ServiceAccounts whose Role allows it. Nothing can be
written. Labels of pods never change here, so a watch need not look for objects that enter or leave its selection.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from specserve_operator.cluster.local.podaccess import PodAccess
from specserve_operator.cluster.local.store import Change, ChangeType, ObjectKey, ObjectStore
from specserve_operator.core.objects import Manifest

PORT = 6443
_KEPT_CHANGES = 1000
_BOOKMARK_SECONDS = 30.0
_DEFAULT_WATCH_SECONDS = 1800.0
_TRUE = ("1", "true")


class ApiError(Exception):
    """Refuses a request with a Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    def render(self) -> dict[str, Any]:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


def parse_selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """A label selector of equalities and existence (`a=b`, `a==b`, `a!=b`, `a`, `!a`). Raises `ApiError` for others."""
    tests: list[Callable[[Mapping[str, str]], bool]] = []
    for term in (part.strip() for part in text.split(",") if part.strip()):
        if "(" in term or ")" in term:
            raise ApiError(400, "BadRequest", f"label selector {text!r}: set terms are not known here")
        if "!=" in term:
            name, _, value = term.partition("!=")
            tests.append(lambda labels, n=name, v=value: labels.get(n) != v)  # type: ignore[misc]
        elif "=" in term:
            name, _, value = term.replace("==", "=").partition("=")
            tests.append(lambda labels, n=name, v=value: labels.get(n) == v)  # type: ignore[misc]
        elif term.startswith("!"):
            tests.append(lambda labels, n=term[1:]: n not in labels)  # type: ignore[misc]
        else:
            tests.append(lambda labels, n=term: n in labels)  # type: ignore[misc]
    return lambda labels: all(test(labels) for test in tests)


class PodApi:
    """An HTTP server over the store."""

    def __init__(self, store: ObjectStore, access: PodAccess) -> None:
        self._store = store
        self._access = access
        self._changes: deque[Change] = deque(maxlen=_KEPT_CHANGES)
        self._oldest_version = int(store.resource_version)
        self._watches: set[asyncio.Queue[Change | None]] = set()
        self._unsubscribe = store.subscribe(self._on_change)
        self._runner: web.AppRunner | None = None

    def _on_change(self, change: Change) -> None:
        if change.obj["kind"] != "Pod":
            return
        if len(self._changes) == _KEPT_CHANGES:
            self._oldest_version = _version(self._changes[0].obj)
        self._changes.append(change)
        for queue in self._watches:
            queue.put_nowait(change)

    async def start(self, host: str, port: int = PORT) -> None:
        """Listens. Raises OSError."""
        app = web.Application(middlewares=[_errors_as_status])
        app.router.add_get("/version", self._get_version)
        app.router.add_get("/api", self._get_versions)
        app.router.add_get("/apis", self._get_groups)
        app.router.add_get("/api/v1/pods", self._refuse_all_namespaces)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._get_pods)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", self._get_pod)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, reuse_address=True).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Ends all watches and stops listening."""
        self._unsubscribe()
        for queue in self._watches:
            queue.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get_version(self, _: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "34", "gitVersion": "v1.34.0+specserve-local"})

    async def _get_versions(self, _: web.Request) -> web.Response:
        return web.json_response({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})

    async def _get_groups(self, _: web.Request) -> web.Response:
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})

    async def _refuse_all_namespaces(self, request: web.Request) -> web.Response:
        self._authorise(request, "list", "*")
        raise AssertionError("no Role covers all namespaces")

    def _authorise(self, request: web.Request, verb: str, namespace: str) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        account = self._access.account_of(token.strip()) if scheme == "Bearer" else None
        if account is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        if not self._access.may(account, verb, "pods", namespace):
            where = "at the cluster scope" if namespace == "*" else f'in the namespace "{namespace}"'
            text = f'User "{account}" cannot {verb} resource "pods" in API group "" {where}'
            raise ApiError(403, "Forbidden", f"pods is forbidden: {text}")

    async def _get_pod(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        self._authorise(request, "get", namespace)
        pod = self._store.get(ObjectKey("Pod", namespace, name))
        if pod is None:
            raise ApiError(404, "NotFound", f'pods "{name}" not found')
        return web.json_response(pod)

    async def _get_pods(self, request: web.Request) -> web.StreamResponse:
        namespace = request.match_info["namespace"]
        is_watch = request.query.get("watch", "") in _TRUE
        self._authorise(request, "watch" if is_watch else "list", namespace)
        selected = parse_selector(request.query.get("labelSelector", ""))

        def wanted(pod: Manifest) -> bool:
            meta = pod["metadata"]
            return bool(meta["namespace"] == namespace) and selected(meta.get("labels", {}))

        if is_watch:
            return await self._watch(request, wanted)
        pods = [pod for pod in self._store.list("Pod", namespace) if wanted(pod)]
        meta = {"resourceVersion": self._store.resource_version}
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": pods})

    async def _watch(self, request: web.Request, wanted: Callable[[Manifest], bool]) -> web.StreamResponse:
        """Streams changes after the given version; without one, all pods there are come first."""
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        for change in self._changes_since(request.query.get("resourceVersion", "")):
            queue.put_nowait(change)
        self._watches.add(queue)
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            response.enable_chunked_encoding()
            bookmarks = request.query.get("allowWatchBookmarks", "") in _TRUE
            seconds = float(request.query.get("timeoutSeconds", _DEFAULT_WATCH_SECONDS))
            with suppress(ConnectionError):  # the client has had enough
                await response.prepare(request)
                await self._stream(response, queue, wanted, bookmarks=bookmarks, timeout_seconds=seconds)
            return response
        finally:
            self._watches.discard(queue)

    def _changes_since(self, version: str) -> list[Change]:
        if version in ("", "0"):
            return [Change(ChangeType.ADDED, pod) for pod in self._store.list("Pod")]
        if int(version) < self._oldest_version:
            raise ApiError(410, "Expired", f"too old resource version: {version} ({self._oldest_version})")
        return [change for change in self._changes if _version(change.obj) > int(version)]

    async def _stream(
        self,
        response: web.StreamResponse,
        queue: asyncio.Queue[Change | None],
        wanted: Callable[[Manifest], bool],
        *,
        bookmarks: bool,
        timeout_seconds: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_seconds
        while (left := end - loop.time()) > 0:
            try:
                change = await asyncio.wait_for(queue.get(), min(left, _BOOKMARK_SECONDS))
            except TimeoutError:
                if bookmarks:
                    await _send(response, "BOOKMARK", self._bookmark())
                continue
            if change is None:
                return
            if wanted(change.obj):
                await _send(response, change.type, change.obj)

    def _bookmark(self) -> Manifest:
        meta = {"resourceVersion": self._store.resource_version, "creationTimestamp": None}
        return {"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": {"containers": []}}


async def _send(response: web.StreamResponse, type_: str, obj: Manifest) -> None:
    await response.write(json.dumps({"type": str(type_), "object": obj}).encode() + b"\n")


def _version(obj: Manifest) -> int:
    return int(obj["metadata"]["resourceVersion"])


@web.middleware
async def _errors_as_status(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except ApiError as error:
        return web.json_response(error.render(), status=error.code)
    except web.HTTPException as error:
        refused = ApiError(error.status, error.reason.replace(" ", ""), f"{request.path}: {error.reason}")
        return web.json_response(refused.render(), status=error.status)
