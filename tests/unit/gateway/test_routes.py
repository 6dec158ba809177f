"""The allow-list of the gateway."""

from http import HTTPStatus

import pytest

from specserve_workers.gateway.routes import find_refusal


def status(method: str, target: str) -> HTTPStatus | None:
    refusal = find_refusal(method.encode(), target.encode("latin-1"))
    return None if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions?stream=1&x=%2Fadd_worker"),
        ("OPTIONS", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/org/model-7b_v1.5:lora"),
        ("GET", "/v1/responses/resp_0af3"),
        ("POST", "/v1/responses/resp_0af3/cancel"),
        ("DELETE", "/v1/responses/resp_0af3"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/messages"),
        ("POST", "/v2/rerank"),
        ("POST", "/score"),
        ("POST", "/rerank"),
        ("POST", "/pooling"),
        ("POST", "/classify"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/version"),
        ("GET", "/ping"),
        ("GET", "/health"),
        ("HEAD", "/health"),
        ("GET", "/liveness"),
        ("HEAD", "/readiness"),
    ],
)
def test_what_computes_passes(method: str, target: str) -> None:
    assert status(method, target) is None


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "HEAD", "PUT"])
@pytest.mark.parametrize(
    "target",
    [
        "/add_worker?url=http://10.6.6.6:80",
        "/remove_worker?url=http://10.0.0.1:8000",
        "/list_workers",
        "/workers",
        "/workers/http:%2F%2F10.6.6.6",
        "/flush_cache",
        "/get_loads",
        "/get_server_info",
        "/get_model_info",
        "/scheduling/diagnostics",
        "/scheduling/finish_session",
        "/health_generate",
        "/generate",
        "/inference/v1/generate",
        "/drain",
        "/metrics",
        "/ready",
        "/docs",
        "/openapi.json",
        "/sleep",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weights",
        "/invocations",
        "/",
        "/v1",
        "/V1/completions",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/Load_LoRA_adapter",
        "/v1/load_lora_adapter?x=1",
    ],
)
def test_what_changes_or_reveals_is_not_found_by_any_method(method: str, target: str) -> None:
    assert status(method, target) is HTTPStatus.NOT_FOUND


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1/v1/models",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/v1/load_lora_adapter/",
        "/v1/../add_worker",
        "/v1/./models",
        "/v1/..",
        "/v1/.",
        "/v1/...",
        "/v1/%2e%2e/add_worker",
        "/v1/..%2fadd_worker",
        "/v1/%6coad_lora_adapter",
        "/v1/%",
        "/v1\\..\\add_worker",
        "/v1/;/../add_worker",
        "/v1/models#/add_worker",
        "/v1/models?x#y",
        "/v1/mod\tels",
        "/v1/mod\x00els",
        "/v1/mod\xe9ls",
        "/v1/models?\x7f",
        "/v1/models?\xe9",
        "*",
        "v1/models",
        "?/v1/models",
        "",
    ],
)
def test_what_could_be_read_as_another_path_is_not_found(target: str) -> None:
    assert status("GET", target) is HTTPStatus.NOT_FOUND


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("PUT", "/v1/completions", b"DELETE, GET, OPTIONS, POST"),
        ("HEAD", "/v1/models", b"DELETE, GET, OPTIONS, POST"),
        ("POST", "/health", b"GET, HEAD"),
        ("DELETE", "/readiness", b"GET, HEAD"),
        ("GET", "/tokenize", b"OPTIONS, POST"),
        ("POST", "/version", b"GET"),
    ],
)
def test_another_method_is_told_which_there_are(method: str, target: str, allowed: bytes) -> None:
    refusal = find_refusal(method.encode(), target.encode())
    assert refusal is not None
    assert refusal.status is HTTPStatus.METHOD_NOT_ALLOWED
    assert dict(refusal.headers)[b"allow"] == allowed
