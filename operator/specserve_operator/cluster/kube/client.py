"""Requests to the API server, over `kubernetes.aio`, with plain dictionaries in and out."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration

from specserve_operator.cluster.kube.kinds import Kind
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.core.objects import Manifest

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

# As values, objects of a list take tens of times their room in memory.
_LIST_CHUNK = 100
_TIMEOUT_SECONDS = 30.0
_CONNECTIONS = 32
# A repetition of the request alone will hardly change the answer: it is the object that is wrong. Not so with 401 and
# 403: an API server that has just started does not know yet who may do what.
_REFUSALS = {400, 404, 405, 406, 413, 415, 422}
_NAMESPACE_ENDS = "NamespaceTerminating"


class ApiError(ClusterError):
    """The API server's answer was no. `status` is the HTTP status, `reason` the API's word for it."""

    def __init__(self, message: str, *, status: int, reason: str = "", is_final: bool = False) -> None:
        super().__init__(message, retryable=not is_final and status not in _REFUSALS)
        self.status = status
        self.reason = reason


class ApiUnreachableError(ClusterError):
    """No answer came."""


@dataclass(frozen=True, slots=True)
class Page:
    """A piece of a list. `version`: resource version of the whole list; 0 if it is no number."""

    objects: Sequence[Manifest]
    version: int


class KubeClient:
    """One connection pool to one API server. An async context manager."""

    def __init__(self, configuration: Configuration) -> None:
        configuration.connection_pool_maxsize = _CONNECTIONS
        # Proxies are for the world outside; one that leaks in from the environment would get the operator's token.
        configuration.client_session_kwargs = {"trust_env": False}
        self._api = ApiClient(configuration)
        self._api.user_agent = "specserve-operator"

    async def __aenter__(self) -> "KubeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | Sequence[Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """HTTP status and decoded JSON of an answer that is a yes. Raises `ApiError` and `ApiUnreachableError`."""
        request = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json"} | dict(headers or {}),
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._api.call_api(*request, _request_timeout=_TIMEOUT_SECONDS)
            text = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiUnreachableError(f"the API server does not answer: {type(error).__name__}: {error}") from error
        if not 200 <= answer.status < 300:
            raise _error(method, path, answer.status, text)
        return answer.status, json.loads(text) if text else None

    async def get(self, path: str) -> Any:
        """The object, or other JSON, at `path`."""
        return (await self.request("GET", path))[1]

    async def list_all(self, kind: Kind, namespace: str | None, *, selector: str | None = None) -> AsyncIterator[Page]:
        """Objects of a kind, piece by piece."""
        query = {"limit": str(_LIST_CHUNK), "labelSelector": kind.selector if selector is None else selector}
        while True:
            _, answer = await self.request("GET", kind.path(namespace), query={k: v for k, v in query.items() if v})
            meta = answer["metadata"]
            version = meta.get("resourceVersion", "")
            yield Page(answer["items"], int(version) if version.isdigit() else 0)
            if not meta.get("continue"):
                return
            query["continue"] = meta["continue"]

    async def apply(
        self, kind: Kind, obj: Manifest, *, manager: str, force: bool = True, subresource: str | None = None
    ) -> Manifest:
        """Server-side apply: the fields of `obj` become so, and are `manager`'s. Returns the object as it is then.

        Without `force`, a field that somebody else has set otherwise is an `ApiError` with status 409.
        """
        meta = obj["metadata"]
        path = kind.path(meta["namespace"], meta["name"], subresource)
        query = {"fieldManager": manager, "force": str(force).lower()}
        _, answer = await self.request("PATCH", path, query=query, body=obj, headers={"Content-Type": APPLY_PATCH})
        applied: Manifest = answer
        return applied

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """Deletes in the background, this very object if `uid` is given. Raises `ApiError` with 404 if it is gone."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self.request("DELETE", kind.path(namespace, name), body=body)


def _error(method: str, path: str, status: int, text: bytes) -> ApiError:
    """The API server says what was wrong in a `Status` object; something between us and it may say anything."""
    is_final = False
    try:
        answer = json.loads(text)
        message, reason = str(answer["message"]), str(answer.get("reason", ""))
        causes = (answer.get("details") or {}).get("causes") or ()
        is_final = any(cause.get("reason") == _NAMESPACE_ENDS for cause in causes)
    except (ValueError, KeyError, TypeError, AttributeError):
        message, reason = f"{method} {path}: HTTP status {status}", ""
    return ApiError(message, status=status, reason=reason, is_final=is_final)
