"""Settings of the KV connector: written by the serving entry points, read by the connector.

`kv_transfer_config` makes the value of vLLM's `--kv-transfer-config`; `ConnectorSettings.from_extra` reads the
part that is ours back in the engine's processes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal

CONNECTOR_CLASS: Final = "SpecserveKvConnector"
CONNECTOR_MODULE: Final = "specserve_workers.vllm.connector"

_KV_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
_FAILURE_POLICIES: Final = {"Recompute": "recompute", "Fail": "fail"}


class ConnectorSettingsError(ValueError):
    """A connector setting is unknown, missing, of the wrong type or out of range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """What the connector needs to know beyond vLLM's own configuration.

    Attributes:
        host: address the producer listens on and tells consumers (the pod's IP). A consumer does not use it.
        port: port of tensor-parallel rank 0; rank r uses `port + r`. 1..65535; 0 only where nothing listens.
        lease_seconds: how long finished prompt blocks are held without progress. > 0.
        connect_timeout_ms: limit on connecting to a producer. > 0.
        stall_timeout_ms: limit on the silence of a transfer; its total time has none. > 0.
        target_revision: only pods of one target revision exchange KV.
        max_leases: more finished prompts than this are not held.
        max_held_ratio: share of all KV blocks that leases may hold, in (0, 1]. Beyond it the producer answers
            without transfer parameters and the decode pod prefills by itself.
        pull_threads: pulls a consumer runs at once, for each rank; at most half of them, rounded up, from one
            producer.
        max_streams: fetches a producer serves at once, for each rank.
        identity_directory: where this pod's certificate is. "" for plaintext.
        namespace, service: whose pods it has to do with; needed with a certificate.
    """

    host: str
    port: int
    lease_seconds: float
    connect_timeout_ms: int
    stall_timeout_ms: int
    target_revision: str
    max_leases: int = 1024
    max_held_ratio: float = 0.5
    pull_threads: int = 8
    max_streams: int = 32
    identity_directory: str = ""
    namespace: str = ""
    service: str = ""

    def __post_init__(self) -> None:
        """Raise `ConnectorSettingsError` naming the first field that is out of range."""
        checks = {
            "host": isinstance(self.host, str) and len(self.host) <= 253,
            "port": _is_int(self.port) and 0 <= self.port <= 65535,
            "lease_seconds": _is_number(self.lease_seconds) and 0 < self.lease_seconds <= 86_400,
            "connect_timeout_ms": _is_int(self.connect_timeout_ms) and 0 < self.connect_timeout_ms <= 3_600_000,
            "stall_timeout_ms": _is_int(self.stall_timeout_ms) and 0 < self.stall_timeout_ms <= 3_600_000,
            "target_revision": isinstance(self.target_revision, str) and len(self.target_revision) <= 256,
            "max_leases": _is_int(self.max_leases) and self.max_leases >= 1,
            "max_held_ratio": _is_number(self.max_held_ratio) and 0 < self.max_held_ratio <= 1,
            "pull_threads": _is_int(self.pull_threads) and 1 <= self.pull_threads <= 256,
            "max_streams": _is_int(self.max_streams) and 1 <= self.max_streams <= 1024,
            "identity_directory": isinstance(self.identity_directory, str),
            "namespace": self._is_name(self.namespace),
            "service": self._is_name(self.service),
        }
        for name, is_valid in checks.items():
            if not is_valid:
                raise ConnectorSettingsError(
                    f"kv_connector_extra_config.{name}: {getattr(self, name)!r} is out of range"
                )

    def _is_name(self, value: object) -> bool:
        return isinstance(value, str) and bool(value or not self.identity_directory)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Read vLLM's `kv_connector_extra_config`. Raises `ConnectorSettingsError` naming the field."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise ConnectorSettingsError(f"kv_connector_extra_config.{unknown[0]}: unknown setting")
        try:
            return cls(**extra)
        except TypeError as error:
            raise ConnectorSettingsError(f"kv_connector_extra_config: {error}") from None


def kv_transfer_config(
    role: Literal["prefill", "decode"],
    *,
    host: str,
    port: int,
    lease_seconds: float,
    connect_timeout_ms: int,
    stall_timeout_ms: int,
    target_revision: str,
    on_failure: Literal["Recompute", "Fail"],
    identity_directory: str = "",
    namespace: str = "",
    service: str = "",
) -> dict[str, Any]:
    """Return the JSON value of vLLM's `--kv-transfer-config` for a pod of this role.

    A decode pod listens on nothing: its `host` and `port` are only recorded. `on_failure` is what its engine
    does with a request whose blocks did not come. Raises `ConnectorSettingsError` naming a bad field.
    """
    settings = ConnectorSettings(
        host=host,
        port=port,
        lease_seconds=lease_seconds,
        connect_timeout_ms=connect_timeout_ms,
        stall_timeout_ms=stall_timeout_ms,
        target_revision=target_revision,
        identity_directory=identity_directory,
        namespace=namespace,
        service=service,
    )
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": _KV_ROLES[role],
        "kv_load_failure_policy": _FAILURE_POLICIES[on_failure],
        "kv_connector_extra_config": asdict(settings),
    }


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
