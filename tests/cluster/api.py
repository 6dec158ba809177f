"""Requests to an API server as its administrator: the shortest way from a test to an object.

One event loop in a thread of its own carries all requests and watches, so that tests are plain functions and what runs
beside them (mirror, fake kubelet) goes on while they block.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

import aiohttp

from hack.kube.access import Access
from hack.kube.components import ADMIN

T = TypeVar("T")
Object = dict[str, Any]

# By the plural name, which no two of them share.
PREFIXES = {
    **dict.fromkeys(
        ("configmaps", "events", "namespaces", "nodes", "pods", "resourcequotas", "secrets", "serviceaccounts"),
        "/api/v1",
    ),
    "services": "/api/v1",
    **dict.fromkeys(("controllerrevisions", "deployments", "replicasets"), "/apis/apps/v1"),
    **dict.fromkeys(
        ("clusterrolebindings", "clusterroles", "rolebindings", "roles"), "/apis/rbac.authorization.k8s.io/v1"
    ),
    "customresourcedefinitions": "/apis/apiextensions.k8s.io/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "podmonitors": "/apis/monitoring.coreos.com/v1",
    **dict.fromkeys(("draftrevisions", "poolscalers", "speculativeservices"), "/apis/specserve.dev/v1alpha1"),
}

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_TIMEOUT = aiohttp.ClientTimeout(total=60)
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5)
_CALL_SECONDS = 90.0
# aiohttp does not wait until its TLS connections are closed.
_CLOSE_SECONDS = 0.1
_BAD_REQUEST, _NOT_FOUND = 400, 404


class RefusedError(Exception):
    """The API server's answer was no: `status` is the HTTP status, the text its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _message(text: str) -> str:
    """The API server's words, from an object or, where it knows no such path, from plain text."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, TypeError, KeyError):
        return text


class BackgroundLoop:
    """An event loop in a thread, for the life of a `with` block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="cluster-tests", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the loop and returns its result to this thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_CALL_SECONDS)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts `work`, which goes on until `end`."""

        async def create() -> asyncio.Task[None]:
            return asyncio.create_task(work)

        return self.run(create())

    def end(self, *tasks: "asyncio.Task[None]") -> None:
        """Cancels what `start` has started, and waits until it has ended. Raises what it ended with before."""

        async def cancel() -> None:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                    raise result

        self.run(cancel())


def path_of(plural: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    """The path of an object, or of a collection."""
    scope = () if namespace is None else ("namespaces", namespace)
    return "/".join([PREFIXES[plural], *scope, plural, *(part for part in (name, subresource) if part is not None)])


class AsyncApi:
    """The requests themselves, for code that runs in the loop."""

    def __init__(self, access: Access) -> None:
        context = ssl.create_default_context(cafile=str(access.ca_file))
        context.load_cert_chain(access.layout.pki / f"{ADMIN}.crt", access.layout.pki / f"{ADMIN}.key")
        self._server = access.server
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=_TIMEOUT)

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(_CLOSE_SECONDS)

    async def request(
        self, method: str, path: str, *, body: Any = None, content_type: str = JSON, query: Mapping[str, str] = {}
    ) -> Any:
        """The decoded answer. Raises `RefusedError`; aiohttp's errors where no answer came."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type}
        async with self._session.request(method, self._server + path, data=data, headers=headers, params=query) as got:
            text = await got.text()
            if got.status >= _BAD_REQUEST:
                raise RefusedError(got.status, _message(text))
            return json.loads(text)

    async def watch(self, path: str, version: str) -> AsyncGenerator[Object, None]:
        """Watch events after `version`, until the stream ends. Raises `RefusedError` where the version is too old."""
        query = {"watch": "1", "resourceVersion": version}
        async with self._session.get(
            self._server + path, params=query, timeout=_WATCH_TIMEOUT, read_bufsize=2**24
        ) as got:
            if got.status >= _BAD_REQUEST:
                raise RefusedError(got.status, await got.text())
            async for line in got.content:
                event: Object = json.loads(line)
                if event["type"] == "ERROR":
                    raise RefusedError(event["object"].get("code", 0), event["object"].get("message", ""))
                yield event


class Api:
    """The same for tests: plain calls, objects by plural, namespace and name.

    `on_write` is called with the plural and the answer of every write: who copies objects can catch up.
    """

    def __init__(self, access: Access, background: BackgroundLoop) -> None:
        self._background = background
        self.on_write: Callable[[str, Object], None] = lambda plural, answer: None

        async def connect() -> AsyncApi:
            return AsyncApi(access)

        self.aio = background.run(connect())

    def close(self) -> None:
        self._background.run(self.aio.close())

    def request(self, method: str, path: str, **rest: Any) -> Any:
        """See `AsyncApi.request`."""
        return self._background.run(self.aio.request(method, path, **rest))

    def _write(self, plural: str, method: str, path: str, **rest: Any) -> Object:
        answer: Object = self.request(method, path, **rest)
        if "dryRun" not in rest.get("query", ()):
            self.on_write(plural, answer)
        return answer

    def get(self, plural: str, namespace: str | None, name: str) -> Object | None:
        """The object; None if there is none."""
        try:
            found: Object = self.request("GET", path_of(plural, namespace, name))
        except RefusedError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        return found

    def find(self, plural: str, namespace: str | None = None, *, selector: str = "") -> list[Object]:
        query = {"labelSelector": selector} if selector else {}
        items: list[Object] = self.request("GET", path_of(plural, namespace), query=query)["items"]
        return items

    def create(self, plural: str, namespace: str | None, obj: Object, *, dry_run: bool = False) -> Object:
        """Creates an object with strict field validation; `dry_run` stops before it is stored."""
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._write(plural, "POST", path_of(plural, namespace), body=obj, query=query)

    def apply(self, plural: str, namespace: str | None, obj: Object, *, manager: str = "kubectl") -> Object:
        """Server-side apply, as `kubectl apply --server-side --force-conflicts` does it."""
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        path = path_of(plural, namespace, obj["metadata"]["name"])
        return self._write(plural, "PATCH", path, body=obj, content_type=APPLY_PATCH, query=query)

    def replace(self, plural: str, namespace: str | None, obj: Object) -> Object:
        """Puts `obj` in the place of the object of its name, whatever that is like; creates it if there is none."""
        path = path_of(plural, namespace, obj["metadata"]["name"])
        found = self.get(plural, namespace, obj["metadata"]["name"])
        if found is None:
            return self.create(plural, namespace, obj)
        metadata = obj["metadata"] | {"resourceVersion": found["metadata"]["resourceVersion"]}
        query = {"fieldValidation": "Strict"}
        return self._write(plural, "PUT", path, body=obj | {"metadata": metadata}, query=query)

    def patch(
        self, plural: str, namespace: str | None, name: str, patch: Object, *, subresource: str | None = None
    ) -> Object:
        """A merge patch, as somebody who edits the object would make it."""
        path = path_of(plural, namespace, name, subresource)
        return self._write(plural, "PATCH", path, body=patch, content_type=MERGE_PATCH)

    def json_patch(self, plural: str, namespace: str | None, name: str, *operations: Object) -> Object:
        """A JSON patch, for one entry of a list."""
        path = path_of(plural, namespace, name)
        return self._write(plural, "PATCH", path, body=list(operations), content_type=JSON_PATCH)

    def delete(self, plural: str, namespace: str | None, name: str, *, propagation: str = "Background") -> None:
        """Raises `RefusedError` with 404 if there is no such object."""
        path = path_of(plural, namespace, name)
        self._write(plural, "DELETE", path, body={"propagationPolicy": propagation})
