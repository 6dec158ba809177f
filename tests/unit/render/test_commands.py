"""The programs in the pods understand the flags that are rendered for them."""

from pathlib import Path

import pytest

from specserve_workers.flags import ServingFlags, parse_flags
from specserve_workers.frontend.middleware import Pool as WorkerPool
from specserve_workers.gateway.flags import parse_flags as parse_gateway_flags
from tests.golden.cases import CASES, render_case


def args_of(case: str, pool: str) -> list[str] | None:
    for obj in render_case(case):
        if obj["kind"] == "Deployment" and obj["metadata"]["labels"]["specserve.dev/pool"] == pool:
            args: list[str] = obj["spec"]["template"]["spec"]["containers"][0]["args"]
            return [arg.replace("$(POD_IP)", "10.0.0.1") for arg in args]
    return None


def flags_of(case: str, pool: WorkerPool) -> ServingFlags:
    args = args_of(case, pool)
    assert args is not None
    return parse_flags(pool, args, environ={"POD_NAMESPACE": "llm", "POD_UID": "u1"})


@pytest.mark.parametrize("case", CASES)
def test_workers_parse_what_is_rendered(case: str) -> None:
    decode = flags_of(case, WorkerPool.DECODE)
    assert decode.host == "10.0.0.1"
    assert decode.runtime_state == Path("/etc/specserve/runtime/state.json")
    if args_of(case, "prefill") is None:
        assert decode.prefill_peers is None
        return
    prefill = flags_of(case, WorkerPool.PREFILL)
    port = prefill.identity.https_port if prefill.identity else prefill.http_port
    assert decode.prefill_peers == f"coder-prefill-{prefill.target_revision}:{port}"
    assert (prefill.kv.port, prefill.target_revision) == (9100, decode.target_revision)


def test_workers_read_every_setting_of_a_full_service() -> None:
    prefill, decode = flags_of("full", WorkerPool.PREFILL), flags_of("full", WorkerPool.DECODE)
    assert (prefill.model, prefill.model_revision, prefill.served_model_name) == (
        "acme/coder-7b",
        "main",
        "acme/coder",
    )
    assert prefill.draft is None
    assert decode.draft is not None
    assert (decode.draft.method, decode.draft.model, decode.draft.model_revision, decode.draft.max_tokens) == (
        "DraftModel",
        "acme/draft-0.5b",
        "0123abc",
        6,
    )
    for flags in (prefill, decode):
        assert (flags.kv.lease_seconds, flags.kv.connect_timeout_ms, flags.kv.stall_timeout_ms) == (10, 250, 2000)
        assert flags.kv.on_failure == "Fail"
    assert (prefill.drain_timeout_seconds, decode.drain_timeout_seconds) == (60, 300)
    assert prefill.engine_args == ("--max-model-len", "8192", "--max-num-batched-tokens", "16384")
    assert decode.engine_args == ("--max-model-len", "8192", "--max-num-seqs", "64")


def test_workers_read_where_they_get_their_certificates() -> None:
    assert flags_of("full", WorkerPool.DECODE).identity is None
    for pool in WorkerPool:
        identity = flags_of("certified", pool).identity
        assert identity is not None
        assert identity.server == "specserve-operator.specserve.svc:9443"
        assert identity.token == Path("/var/run/secrets/specserve/token")
        assert identity.trust_bundle == Path("/etc/specserve/trust/ca.pem")
        assert identity.directory == Path("/var/run/specserve/identity")
        assert identity.https_port == (8443 if pool is WorkerPool.PREFILL else 0)


def test_the_gateway_and_its_router_parse_what_is_rendered() -> None:
    launch_router = pytest.importorskip("vllm_router.launch_router")
    args = args_of("minimal", "gateway")
    assert args is not None
    flags = parse_gateway_flags(args)
    assert (flags.host, flags.http_port) == ("10.0.0.1", 8000)
    parsed = launch_router.parse_router_args([*flags.router_flags, "--host", "127.0.0.1", "--port", "4"])
    assert (parsed.host, parsed.port, parsed.policy) == ("127.0.0.1", 4, "round_robin")
    assert parsed.service_discovery is True
    assert parsed.selector == {"specserve.dev/service": "coder", "specserve.dev/pool": "decode"}
    assert parsed.service_discovery_port == 8000
    assert parsed.health_check_endpoint == "/ready"
    assert (parsed.retry_max_retries, parsed.health_check_interval_secs) == (2, 2)
    assert (parsed.prometheus_host, parsed.prometheus_port) == ("10.0.0.1", 29000)
