from pathlib import Path

import pytest

from specserve_operator.api.engine_flags import OWNED_FLAGS as OPERATOR_FLAGS
from specserve_workers.flags import OWNED_ENGINE_FLAGS, FlagError, parse_flags, refuse_owned_flags
from specserve_workers.frontend.middleware import Pool
from specserve_workers.vllm.launch import OWNED_FLAGS

REQUIRED = [
    *("--model", "/models/target", "--served-model-name", "coder", "--service", "coder"),
    *("--revision", "r1", "--target-revision", "t1", "--host", "10.0.0.7"),
]
DRAFT = ["--draft-method", "DraftModel", "--draft-model", "/models/draft", "--max-draft-tokens", "6"]


def test_a_minimal_decode_pod_serves_aggregated_without_a_drafter():
    flags = parse_flags(Pool.DECODE, REQUIRED, environ={"POD_NAME": "p", "POD_UID": "u"})
    assert (flags.http_port, flags.control_port, flags.kv.port) == (8000, 9000, 9100)
    assert flags.runtime_state == Path("/etc/specserve/runtime/state.json")
    assert flags.draft is None
    assert not flags.has_kv_transfer
    assert (flags.pod_name, flags.pod_uid) == ("p", "u")


def test_all_flags_of_the_contract_are_read():
    argv = [*REQUIRED, *DRAFT, "--draft-model-revision", "c2", "--model-revision", "c1"]
    argv += ["--prefill-peers", "coder-prefill-t1:8000", "--kv-lease-seconds", "12.5", "--kv-on-failure", "Fail"]
    argv += ["--kv-connect-timeout-ms", "100", "--kv-stall-timeout-ms", "200", "--drain-timeout-seconds", "9"]
    argv += ["--", "--max-model-len", "8192", "--enforce-eager"]
    flags = parse_flags(Pool.DECODE, argv, environ={})
    assert flags.draft is not None
    assert (flags.draft.model, flags.draft.model_revision, flags.draft.max_tokens) == ("/models/draft", "c2", 6)
    assert flags.has_kv_transfer
    assert (flags.kv.lease_seconds, flags.kv.on_failure) == (12.5, "Fail")
    assert (flags.kv.connect_timeout_ms, flags.kv.stall_timeout_ms) == (100, 200)
    assert flags.engine_args == ("--max-model-len", "8192", "--enforce-eager")


IDENTITY = ["--identity-server", "operator.specserve.svc:9443"]
POD = {"POD_NAME": "p", "POD_UID": "u", "POD_NAMESPACE": "llm"}


def test_without_a_certificate_service_a_pod_speaks_plaintext():
    for pool in Pool:
        assert parse_flags(pool, REQUIRED, environ=POD).identity is None


def test_a_pod_with_certificates_finds_everything_in_its_usual_place():
    flags = parse_flags(Pool.PREFILL, [*REQUIRED, *IDENTITY], environ=POD)
    assert flags.identity is not None
    assert flags.identity.server == "operator.specserve.svc:9443"
    assert flags.identity.token == Path("/var/run/secrets/specserve/token")
    assert flags.identity.trust_bundle == Path("/etc/specserve/trust/ca.pem")
    assert flags.identity.directory == Path("/var/run/specserve/identity")
    assert (flags.identity.https_port, flags.pod_namespace) == (8443, "llm")


@pytest.mark.parametrize("missing", ["POD_NAMESPACE", "POD_UID"])
def test_a_pod_that_does_not_know_who_it_is_gets_no_certificate(missing: str):
    environ = {name: value for name, value in POD.items() if name != missing}
    with pytest.raises(FlagError, match=f"--identity-server: needs {missing}"):
        parse_flags(Pool.DECODE, [*REQUIRED, *IDENTITY], environ=environ)


def test_only_a_prefill_pod_takes_requests_over_tls():
    with pytest.raises(FlagError, match="--https-port"):
        parse_flags(Pool.DECODE, [*REQUIRED, *IDENTITY, "--https-port", "8443"], environ=POD)


def test_no_drain_time_is_a_choice():
    flags = parse_flags(Pool.DECODE, [*REQUIRED, "--drain-timeout-seconds", "0"], environ={})
    assert flags.drain_timeout_seconds == 0


def test_a_prefill_pod_gives_kv_away_and_knows_no_draft():
    assert parse_flags(Pool.PREFILL, REQUIRED, environ={}).has_kv_transfer
    with pytest.raises(FlagError, match="--draft-method"):
        parse_flags(Pool.PREFILL, [*REQUIRED, *DRAFT], environ={})


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (REQUIRED[2:], "--model"),
        ([*REQUIRED, "--http-port", "0"], "--http-port"),
        ([*REQUIRED, "--http-port", "x"], "--http-port"),
        ([*REQUIRED, "--mode", "x"], "--mode"),
        ([*REQUIRED, "--kv-lease-seconds", "0"], "--kv-lease-seconds"),
        ([*REQUIRED, "--kv-lease-seconds", "nan"], "--kv-lease-seconds"),
        ([*REQUIRED, "--kv-connect-timeout-ms", "1.5"], "--kv-connect-timeout-ms"),
        ([*REQUIRED, "--kv-on-failure", "Retry"], "--kv-on-failure"),
        ([*REQUIRED, "--drain-timeout-seconds", "-1"], "--drain-timeout-seconds"),
        ([*REQUIRED, "--drain-timeout-seconds", "nan"], "--drain-timeout-seconds"),
        ([*REQUIRED, "--prefill-peers", "nowhere"], "--prefill-peers"),
        ([*REQUIRED, "--identity-server", "operator"], "--identity-server"),
        ([*REQUIRED, "--identity-server", "operator:0"], "--identity-server"),
        ([*REQUIRED, "--draft-method", "Oracle"], "--draft-method"),
        ([*REQUIRED, "--draft-method", "DraftModel"], "--draft-model"),
        ([*REQUIRED, "--draft-model", "/x"], "--draft-model"),
        ([*REQUIRED, *DRAFT, "--max-draft-tokens", "65"], "--max-draft-tokens"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(argv: list[str], named: str):
    with pytest.raises(FlagError, match=named):
        parse_flags(Pool.DECODE, argv, environ={})


@pytest.mark.parametrize("flag", sorted(OWNED_ENGINE_FLAGS))
def test_engine_flags_of_the_operator_are_refused_by_name(flag: str):
    with pytest.raises(FlagError, match=rf"^{flag}: set by the operator"):
        parse_flags(Pool.DECODE, [*REQUIRED, "--", flag, "x"], environ={})


@pytest.mark.parametrize(
    ("spelling", "flag"),
    [
        ("--port=1", "--port"),
        ("--speculative_config={}", "--speculative-config"),
        ("--speculative-config.method=ngram", "--speculative-config"),
        ("--kv_transfer_config.kv_role", "--kv-transfer-config"),
        ("--middleware+", "--middleware"),
        ("--ssl_ciphers=ALL", "--ssl-ciphers"),
        ("-sc=x", "-sc"),
        ("-sc.method=ngram", "-sc"),
        ("-sc.method", "-sc"),
        ("-sc+", "-sc"),
        ("-asc=4", "-asc"),
    ],
)
def test_other_spellings_of_an_owned_flag_are_refused_too(spelling: str, flag: str):
    with pytest.raises(FlagError, match=rf"^{flag}:"):
        refuse_owned_flags([spelling])


@pytest.mark.parametrize(
    ("spelling", "means"),
    [
        ("--middlewar", "--middleware"),
        ("--middlewar=x", "--middleware"),
        ("--kv_transfer", "--kv-transfer-config"),
        ("--speculative.method=ngram", "--speculative-config"),
        ("--worker-ext", "--worker-extension-cls"),
        ("--served", "--served-model-name"),
        ("--async", "--async-scheduling"),
        ("--ud", "--uds"),
        ("--api-k", "--api-key"),
        ("--ssl-", "--ssl-"),
        ("-s", "-sc"),
        ("-s.method=ngram", "-sc"),
        ("-as", "-asc"),
        ("-scx", "-sc"),
        ("-dp2", "-dp"),
        ("-dpl", "-dp"),
        ("--data-parallel-rank", "--data-parallel-"),
        ("--ssl-new-in-the-engine", "--ssl-"),
        ("--spec-new-in-the-engine", "--spec-"),
        ("--", "--"),
    ],
)
def test_what_the_engine_may_read_as_an_owned_flag_is_refused_too(spelling: str, means: str):
    with pytest.raises(FlagError, match=rf"{means}.*set by the operator"):
        refuse_owned_flags([spelling])


@pytest.mark.parametrize(
    "args",
    [
        ["--dtype", "bfloat16"],
        ["--max-model-len=-1"],
        ["--max_model_len", "8k"],
        ["--enforce-eager"],
        ["--block-size", "32"],
        ["--kv-cache-memory-bytes", "1g"],
        ["--max-num-seqs", "8"],
        ["--model-impl", "auto"],
        ["--config-format", "hf"],
        ["--kv-cache-dtype", "fp8"],
        ["--compilation-config.mode", "0"],
        ["--specialize-active-lora"],
        ["-O3"],
        ["-tp", "2"],
        ["-ac.backend=FLASH_ATTN"],
        ["-dcp", "2"],
        ["--chat-template", "-"],
        ["--seed", "-1"],
    ],
)
def test_the_engines_own_flags_pass(args: list[str]):
    refuse_owned_flags(args)


def test_values_that_look_like_nothing_are_left_alone():
    refuse_owned_flags(["--chat-template", "host", "-tp", "2", "--max-model-len", "-1"])


@pytest.mark.parametrize("flag", OPERATOR_FLAGS)
def test_a_flag_that_the_operator_refuses_is_refused_here_too(flag: str):
    with pytest.raises(FlagError, match="set by the operator"):
        refuse_owned_flags([flag])


def test_every_flag_that_the_speculation_hooks_set_is_owned():
    assert set(OWNED_FLAGS) <= OWNED_ENGINE_FLAGS
