"""The engine's KV configuration: written for a pod's role, read back in its processes."""

from typing import Any

import pytest

from specserve_workers.kv.config import ConnectorSettings, ConnectorSettingsError, kv_transfer_config
from specserve_workers.kv.foreign_blocks import notify_foreign_blocks, set_foreign_block_listener

VALUES: dict[str, Any] = {
    "host": "10.0.0.1",
    "port": 9100,
    "lease_seconds": 30,
    "connect_timeout_ms": 500,
    "stall_timeout_ms": 5000,
    "target_revision": "abc",
}


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
@pytest.mark.parametrize(("on_failure", "policy"), [("Recompute", "recompute"), ("Fail", "fail")])
def test_config_names_the_connector_role_and_policy(role: Any, kv_role: str, on_failure: Any, policy: str) -> None:
    config = kv_transfer_config(role, on_failure=on_failure, **VALUES)
    assert config["kv_connector"] == "SpecserveKvConnector"
    assert config["kv_connector_module_path"] == "specserve_workers.vllm.connector"
    assert (config["kv_role"], config["kv_load_failure_policy"]) == (kv_role, policy)
    assert ConnectorSettings.from_extra(config["kv_connector_extra_config"]) == ConnectorSettings(**VALUES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", None),
        ("port", 70000),
        ("port", True),
        ("lease_seconds", 0),
        ("lease_seconds", "30"),
        ("connect_timeout_ms", 0),
        ("stall_timeout_ms", 1.5),
        ("target_revision", 7),
        ("max_leases", 0),
        ("max_held_ratio", 1.5),
        ("pull_threads", 0),
        ("max_streams", 0),
        ("identity_directory", None),
        ("namespace", 7),
        ("service", None),
    ],
)
def test_setting_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConnectorSettingsError, match=rf"kv_connector_extra_config\.{name}: "):
        ConnectorSettings.from_extra({**VALUES, name: value})


def test_certificates_need_to_know_whose_pods_they_are_for() -> None:
    identity = {"identity_directory": "/run/identity", "namespace": "llm", "service": "coder"}
    config = kv_transfer_config("decode", on_failure="Fail", **VALUES, **identity)
    assert ConnectorSettings.from_extra(config["kv_connector_extra_config"]).identity_directory == "/run/identity"
    for name in ("namespace", "service"):
        with pytest.raises(ConnectorSettingsError, match=rf"kv_connector_extra_config\.{name}: "):
            ConnectorSettings.from_extra({**VALUES, **identity, name: ""})


def test_unknown_and_missing_settings_are_refused_by_name() -> None:
    with pytest.raises(ConnectorSettingsError, match="hosts: unknown setting"):
        ConnectorSettings.from_extra({**VALUES, "hosts": "x"})
    with pytest.raises(ConnectorSettingsError, match="port"):
        ConnectorSettings.from_extra({name: value for name, value in VALUES.items() if name != "port"})


def test_only_the_last_foreign_block_listener_hears_until_it_is_taken_away() -> None:
    old: list[list[int]] = []
    new: list[list[int]] = []
    set_foreign_block_listener(lambda block_ids: old.append(list(block_ids)))
    notify_foreign_blocks((4, 5))
    set_foreign_block_listener(lambda block_ids: new.append(list(block_ids)))
    notify_foreign_blocks((6,))
    set_foreign_block_listener(None)
    notify_foreign_blocks((7,))
    assert (old, new) == ([[4, 5]], [[6]])
