"""The pod of a prefill or decode engine."""

from typing import Any

from specserve_operator.constants import (
    ENGINE_CONTAINER,
    PORT_CONTROL,
    PORT_HTTP,
    PORT_KV,
    RUNTIME_FILE,
    RUNTIME_MOUNT,
)
from specserve_operator.core.launch import EngineLaunch
from specserve_operator.core.names import Pool, prefill_peers_name, runtime_config_name
from specserve_operator.core.snapshot import FLAG_MAX_DRAFT_TOKENS
from specserve_operator.core.weights import CLAIMS_MOUNT, Weights
from specserve_operator.identity.names import PORT_HTTPS
from specserve_operator.render.pod import (
    TERMINATION_MARGIN_SECONDS,
    container_security_context,
    field_env,
    http_probe,
    pod_security_context,
    port,
)
from specserve_operator.render.trust import identity_flags, identity_volumes

# Downloaded weights and compiled kernels. Its own volume, so that it can be a larger or a shared one.
CACHE_MOUNT = "/var/cache/specserve"
_RUNTIME_VOLUME, _CACHE_VOLUME, _TMP_VOLUME, _SHM_VOLUME = "specserve-runtime", "cache", "tmp", "shm"


def render_engine_pod(launch: EngineLaunch, *, revision: str) -> dict[str, Any]:
    """The `spec` of the pod template, before the user's template is merged in."""
    volumes, mounts = _volumes(launch)
    container: dict[str, Any] = {
        "name": ENGINE_CONTAINER,
        "image": launch.image,
        "command": ["python", "-m", f"specserve_workers.{launch.pool}"],
        "args": _engine_flags(launch, revision=revision),
        "env": _environment(launch),
        "ports": _ports(launch),
        # Loading weights may take half an hour; a first request that compiles kernels, minutes. Only serving counts
        # strictly.
        "startupProbe": http_probe("/ready", period_seconds=2, timeout_seconds=5, failures=900),
        "readinessProbe": http_probe("/ready", period_seconds=2, timeout_seconds=5, failures=3),
        "livenessProbe": http_probe("/health", period_seconds=10, timeout_seconds=10, failures=30),
        # Over no port: whoever could reach it could drain the pod.
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-m", "specserve_workers.drain"]}}},
        # A pod that cannot start says why in its last lines; see core/diagnosis.py.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security_context(),
        "volumeMounts": mounts,
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": launch.drain_timeout_seconds + TERMINATION_MARGIN_SECONDS,
        "securityContext": pod_security_context(),
        "containers": [container],
        "volumes": volumes,
    }


def _engine_flags(launch: EngineLaunch, *, revision: str) -> list[str]:
    """The flags of docs/contracts.md; the engine's own follow `--`."""
    flags = [
        *_weights_flags("--model", launch.model),
        *("--served-model-name", launch.served_model_name),
        *("--service", launch.service),
        *("--revision", revision),
        *("--target-revision", launch.target_revision),
        *("--host", "$(POD_IP)"),
        *("--http-port", str(PORT_HTTP)),
        *("--control-port", str(PORT_CONTROL)),
        *("--runtime-state", f"{RUNTIME_MOUNT}/{RUNTIME_FILE}"),
        *_draft_flags(launch),
        *_kv_transfer_flags(launch),
        *_identity_flags(launch),
        *("--drain-timeout-seconds", str(launch.drain_timeout_seconds)),
    ]
    return [*flags, "--", *launch.engine_args] if launch.engine_args else flags


def _weights_flags(flag: str, weights: Weights) -> list[str]:
    revision = [f"{flag}-revision", weights.revision] if weights.revision else []
    return [flag, weights.path_or_id, *revision]


def _draft_flags(launch: EngineLaunch) -> list[str]:
    if launch.draft is None:
        return []
    return [
        *("--draft-method", str(launch.draft.method)),
        *_weights_flags("--draft-model", launch.draft.weights),
        *(FLAG_MAX_DRAFT_TOKENS, str(launch.draft.max_tokens)),
    ]


def _kv_transfer_flags(launch: EngineLaunch) -> list[str]:
    transfer = launch.kv_transfer
    if transfer is None:
        return []
    if launch.pool is Pool.DECODE:
        peers_port = PORT_HTTP if launch.identity_server is None else PORT_HTTPS
        # A name in their own namespace, so that no cluster domain is assumed.
        role = ["--prefill-peers", f"{prefill_peers_name(launch.service, launch.target_revision)}:{peers_port}"]
    else:
        role = ["--kv-port", str(PORT_KV)]
    return [
        *role,
        *("--kv-lease-seconds", str(transfer.lease_seconds)),
        *("--kv-connect-timeout-ms", str(transfer.connect_timeout_ms)),
        *("--kv-stall-timeout-ms", str(transfer.stall_timeout_ms)),
        *("--kv-on-failure", str(transfer.on_failure)),
    ]


def _identity_flags(launch: EngineLaunch) -> list[str]:
    if launch.identity_server is None:
        return []
    own_port = ["--https-port", str(PORT_HTTPS)] if launch.pool is Pool.PREFILL else []
    return [*identity_flags(launch.identity_server), *own_port]


def _ports(launch: EngineLaunch) -> list[dict[str, Any]]:
    ports = [port("http", PORT_HTTP), port("control", PORT_CONTROL)]
    if launch.pool is Pool.PREFILL:
        ports.append(port("kv", PORT_KV))
        if launch.identity_server is not None:
            ports.append(port("https", PORT_HTTPS))
    return ports


def _environment(launch: EngineLaunch) -> list[dict[str, Any]]:
    env = [
        field_env("POD_NAME", "metadata.name"),
        field_env("POD_UID", "metadata.uid"),
        field_env("POD_IP", "status.podIP"),
        field_env("POD_NAMESPACE", "metadata.namespace"),
    ]
    if launch.secret_name is not None:
        source = {"secretKeyRef": {"name": launch.secret_name, "key": "token"}}
        env.append({"name": "HF_TOKEN", "valueFrom": source})
    if not launch.local:
        env += [
            {"name": "HOME", "value": CACHE_MOUNT},
            {"name": "HF_HOME", "value": f"{CACHE_MOUNT}/huggingface"},
            {"name": "XDG_CACHE_HOME", "value": CACHE_MOUNT},
            # The pod's user has no name in the image, and libraries that ask for one fail without this.
            {"name": "USER", "value": "specserve"},
        ]
    return env


def _volumes(launch: EngineLaunch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of the pod and mounts of its container."""
    volumes: list[dict[str, Any]] = [
        {"name": _RUNTIME_VOLUME, "configMap": {"name": runtime_config_name(launch.service)}}
    ]
    mounts: list[dict[str, Any]] = [{"name": _RUNTIME_VOLUME, "mountPath": RUNTIME_MOUNT, "readOnly": True}]
    if launch.identity_server is not None:
        more_volumes, more_mounts = identity_volumes(launch.service)
        volumes += more_volumes
        mounts += more_mounts
    if not launch.local:
        for name, path, source in (
            (_TMP_VOLUME, "/tmp", {}),
            (_CACHE_VOLUME, CACHE_MOUNT, {}),
            (_SHM_VOLUME, "/dev/shm", {"medium": "Memory"}),
        ):
            volumes.append({"name": name, "emptyDir": source})
            mounts.append({"name": name, "mountPath": path})
    draft = launch.draft.weights if launch.draft else None
    for claim in dict.fromkeys(w.claim for w in (launch.model, draft) if w is not None and w.claim):
        volumes.append({"name": f"claim-{claim}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        mounts.append({"name": f"claim-{claim}", "mountPath": f"{CLAIMS_MOUNT}/{claim}", "readOnly": True})
    return volumes, mounts
