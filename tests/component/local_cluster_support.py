"""Builders and waits for tests that run small programs as pods of a local cluster."""

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar

from specserve_operator.cluster.local import LocalCluster, LocalOptions

T = TypeVar("T")
Manifest = dict[str, Any]

# Back-off and graces small enough for tests; everything else as users have it.
OPTIONS = LocalOptions(
    restart_backoff_seconds=0.1, restart_backoff_max_seconds=0.4, shutdown_seconds=5.0, linger_seconds=0.3
)
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}

# Answers GET / with its argument; /ready is 200 while there is a file `ready` in the working directory.
HTTP_SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/drain":
            print("drained", flush=True)
        body = sys.argv[2].encode()
        self.send_response(503 if self.path == "/ready" and not os.path.exists("ready") else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
def stop(*_):
    print("terminated", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("serving", flush=True)
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""


def container(*command: str, name: str = "engine", **fields: Any) -> Manifest:
    return {"name": name, "command": list(command), **fields}


def python(code: str, *arguments: str, **fields: Any) -> Manifest:
    """A container that runs `code`; `python` is looked up as in a real pod."""
    return container("python", "-I", "-S", "-c", code, *arguments, **fields)


def shell(script: str, **fields: Any) -> Manifest:
    return container("sh", "-c", script, **fields)


def http_server(text: str, **fields: Any) -> Manifest:
    ports = [{"name": "http", "containerPort": 8000}]
    return python(HTTP_SERVER, "$(POD_IP)", text, env=[POD_IP], ports=ports, **fields)


def deployment(
    name: str, *containers: Manifest, replicas: int = 1, pod_labels: dict[str, str] | None = None, **pod_spec: Any
) -> Manifest:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": {**labels, **(pod_labels or {})}},
                "spec": {"containers": list(containers), **pod_spec},
            },
        },
    }


def service(name: str, app: str, *, port: int | None = None) -> Manifest:
    """A headless Service, or with a port one that listens."""
    spec: Manifest = {"selector": {"app": app}}
    if port is None:
        spec["clusterIP"] = "None"
    else:
        spec["ports"] = [{"name": "http", "port": port, "targetPort": "http"}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


def config_map(name: str, **data: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "default"}, "data": data}


def pod_reader_role(account: str) -> list[Manifest]:
    """A ServiceAccount that may read pods."""
    rbac = "rbac.authorization.k8s.io"
    meta = {"name": account, "namespace": "default"}
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": [rule]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "subjects": [{"kind": "ServiceAccount", "name": account}],
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": account},
        },
    ]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pods(cluster: LocalCluster, app: str) -> list[Manifest]:
    return [p for p in cluster.list_objects("Pod") if p["metadata"]["labels"]["app"] == app]


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def first_status(cluster: LocalCluster, app: str) -> Manifest:
    """The status of the first container of the first pod; empty while there is none."""
    for pod in pods(cluster, app):
        for status in pod.get("status", {}).get("containerStatuses", []):
            return dict(status)
    return {}


async def ready_pods(cluster: LocalCluster, app: str, count: int = 1) -> list[Manifest]:
    def ready() -> list[Manifest] | None:
        found = [p for p in pods(cluster, app) if is_ready(p)]
        return found if len(found) == count == len(pods(cluster, app)) else None

    return await eventually(ready)


async def eventually(
    condition: Callable[[], T | None] | Callable[[], Awaitable[T | None]], *, timeout_seconds: float = 15.0
) -> T:
    """The first true value of `condition`; fails the test if there is none in time."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if isawaitable(value):
            value = await value
        if value:
            return value  # type: ignore[return-value]
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds} s; last value {value!r}")
        await asyncio.sleep(0.02)


def log_of(cluster: LocalCluster, pod: Manifest, *, previous: bool = False) -> str:
    return cluster.read_log(pod["metadata"]["namespace"], pod["metadata"]["name"], previous=previous)


def reasons(cluster: LocalCluster) -> set[str]:
    return {event["reason"] for event in cluster.list_objects("Event")}


PYTHON = sys.executable
