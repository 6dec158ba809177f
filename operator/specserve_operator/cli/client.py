"""Talks to the control plane of a state directory over its unix socket. Standard library only: it must start fast."""

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from specserve_operator.cli.errors import refuse_usage
from specserve_operator.core.objects import Manifest, ServiceKey

SOCKET_NAME = "api.sock"
NOT_FOUND = 404
BAD_REQUEST = 400  # what the user wrote cannot be used
_MAX_SOCKET_PATH = 100  # the kernel's limit is 107 bytes
_TIMEOUT_SECONDS = 30.0


class NotRunning(Exception):  # noqa: N818 - a state, not a failure of the program
    """No control plane answers on the state directory."""


class ApiError(Exception):
    """The control plane refused; the message is for the user. `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def socket_path(state_dir: Path) -> str:
    """Where the control plane listens: relative to the working directory where that is shorter."""
    absolute = str(state_dir.absolute() / SOCKET_NAME)
    path = min(absolute, os.path.relpath(absolute), key=len)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        refuse_usage(f"the path {absolute} is too long for a unix socket: choose a shorter --state-dir")
    return path


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, *, timeout_seconds: float | None) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """One method per route of `cli.server`. Methods raise `NotRunning` and `ApiError`."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir

    def is_running(self) -> bool:
        """True if a control plane answers."""
        try:
            self.info()
        except NotRunning:
            return False
        return True

    def info(self) -> dict[str, Any]:
        """`version` and `pid` of the control plane."""
        return dict(self._call("GET", "/v1/info"))

    def list_objects(self, kind: str, *, namespace: str | None = None) -> list[Manifest]:
        """All objects of a kind, by namespace and name."""
        query = {} if namespace is None else {"namespace": namespace}
        return list(self._call("GET", f"/v1/objects/{kind}", query=query)["items"])

    def apply(self, manifests: Sequence[Manifest]) -> list[dict[str, str]]:
        """Creates or changes services; all are checked before the first is stored. One `{name, outcome}` each."""
        return list(self._call("POST", "/v1/services", body={"manifests": list(manifests)})["results"])

    def delete(self, key: ServiceKey, *, wait_seconds: float) -> bool:
        """Deletes a service and waits for its pods to end. False if the time ran out before that."""
        path = f"/v1/services/{quote(key.namespace)}/{quote(key.name)}"
        answer = self._call(
            "DELETE", path, query={"wait_seconds": str(wait_seconds)}, timeout_seconds=wait_seconds + 30
        )
        return bool(answer["gone"])

    def scale(self, key: ServiceKey, replicas: Mapping[str, int]) -> dict[str, str]:
        """Sets `spec.<pool>.replicas` of the pools named, or the PoolScaler of those in mode External.

        `{name, outcome}`.
        """
        path = f"/v1/services/{quote(key.namespace)}/{quote(key.name)}/scale"
        return dict(self._call("POST", path, body={"replicas": dict(replicas)}))

    def upgrade(self, key: ServiceKey) -> dict[str, str]:
        """Asks for the pods that this version would make. `{name, outcome}`."""
        path = f"/v1/services/{quote(key.namespace)}/{quote(key.name)}/upgrade"
        return dict(self._call("POST", path))

    def log_lines(
        self,
        namespace: str,
        pod: str,
        *,
        container: str | None = None,
        previous: bool = False,
        tail_lines: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Lines of the log as it is now; with `follow`, those that come until the pod is gone too."""
        options = {
            "container": container,
            "previous": "1" if previous else None,
            "tail": None if tail_lines is None else str(tail_lines),
            "follow": "1" if follow else None,
        }
        query = {key: value for key, value in options.items() if value is not None}
        path = f"/v1/pods/{quote(namespace)}/{quote(pod)}/log"
        response = self._open("GET", path, query=query, timeout_seconds=None if follow else _TIMEOUT_SECONDS)
        try:
            with response:
                while line := response.readline():
                    yield line.decode(errors="replace")
        except TimeoutError as error:
            raise ApiError("the control plane stopped in the middle of the log", status=504) from error
        except (OSError, http.client.HTTPException) as error:
            raise NotRunning(f"the control plane on {self.state_dir} has ended") from error

    def shut_down(self) -> None:
        """Asks the control plane to end; it answers before it does."""
        self._call("POST", "/v1/shutdown")

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> Any:
        with self._open(method, path, query=query, body=body, timeout_seconds=timeout_seconds) as response:
            return json.loads(response.read())

    def _open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_seconds: float | None = _TIMEOUT_SECONDS,
    ) -> http.client.HTTPResponse:
        connection = _UnixConnection(socket_path(self.state_dir), timeout_seconds=timeout_seconds)
        target = f"{path}?{urlencode(query)}" if query else path
        try:
            # One request for each connection: then the response owns the socket and closes it.
            headers = {"Connection": "close"}
            connection.request(method, target, body=None if body is None else json.dumps(body), headers=headers)
            response = connection.getresponse()
        except (FileNotFoundError, ConnectionError) as error:
            connection.close()
            raise NotRunning(
                f"no control plane is running on {self.state_dir}: start one with `specserve up -f FILE`"
            ) from error
        except TimeoutError as error:
            connection.close()
            raise ApiError(f"the control plane did not answer within {timeout_seconds:g} s", status=504) from error
        if response.status >= 400:
            with response:
                raise ApiError(_message_of(response), status=response.status)
        return response


def _message_of(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or f"the control plane answered {response.status}"
