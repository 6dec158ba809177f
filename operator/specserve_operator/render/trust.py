"""How pods get certificates and trust each other: the trust bundle, and what a pod mounts and is told."""

from typing import Any

from specserve_operator.core.names import object_labels
from specserve_operator.core.objects import Manifest
from specserve_operator.identity.names import (
    FLAG_IDENTITY_SERVER,
    IDENTITY_DIRECTORY,
    IDENTITY_MOUNT,
    TOKEN_AUDIENCE,
    TOKEN_FILE,
    TOKEN_MOUNT,
    TOKEN_SECONDS,
    TRUST_FILE,
    TRUST_MOUNT,
    trust_config_name,
)
from specserve_operator.render.metadata import Owner

_TRUST_VOLUME, _TOKEN_VOLUME, _IDENTITY_VOLUME = "specserve-trust", "specserve-token", "specserve-identity"


def render_trust(owner: Owner, bundle: str) -> Manifest:
    """The ConfigMap with the authorities that the pods of a service trust. `bundle`: PEM.

    It is to be applied whenever the bundle changes, also while the spec has problems: what runs keeps running, and
    would after a rotation trust nobody.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(trust_config_name(owner.name), labels=object_labels(owner.name)),
        "data": {TRUST_FILE: bundle},
    }


def identity_flags(identity_server: str) -> list[str]:
    """Flags of a pod that gets certificates."""
    return [
        *(FLAG_IDENTITY_SERVER, identity_server),
        *("--identity-token", f"{TOKEN_MOUNT}/{TOKEN_FILE}"),
        *("--trust-bundle", f"{TRUST_MOUNT}/{TRUST_FILE}"),
        *("--identity-directory", IDENTITY_DIRECTORY),
    ]


def identity_volumes(service: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of such a pod, and mounts of its container."""
    token = {"audience": TOKEN_AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": TOKEN_FILE}
    volumes: list[dict[str, Any]] = [
        {"name": _TRUST_VOLUME, "configMap": {"name": trust_config_name(service)}},
        {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}},
        # Keys never reach a disk, and go with the pod.
        {"name": _IDENTITY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": _TRUST_VOLUME, "mountPath": TRUST_MOUNT, "readOnly": True},
        {"name": _TOKEN_VOLUME, "mountPath": TOKEN_MOUNT, "readOnly": True},
        {"name": _IDENTITY_VOLUME, "mountPath": IDENTITY_MOUNT},
    ]
    return volumes, mounts
