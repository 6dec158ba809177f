"""Parts that engine and gateway pods share."""

from typing import Any

POD_USER_ID = 65532  # no one on any system; images need no entry for it

# A pod is killed this long after its drain time, so that a drain that ends just in time is not cut.
TERMINATION_MARGIN_SECONDS = 30


def pod_security_context() -> dict[str, Any]:
    """What the restricted Pod Security Standard asks of a pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": POD_USER_ID,
        "runAsGroup": POD_USER_ID,
        "fsGroup": POD_USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context() -> dict[str, Any]:
    """What the restricted Pod Security Standard asks of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def http_probe(path: str, *, period_seconds: int, timeout_seconds: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": timeout_seconds,
        "failureThreshold": failures,
    }


def field_env(name: str, path: str) -> dict[str, Any]:
    """An environment variable from the downward API."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
