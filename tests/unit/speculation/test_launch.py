import json

import pytest

from specserve_workers.vllm.launch import (
    OWNED_FLAGS,
    WORKER_CLASSES,
    Platform,
    engine_environment,
    speculation_engine_args,
)


def test_an_engine_without_drafter_still_gets_the_worker_class() -> None:
    assert speculation_engine_args(None, None, max_draft_tokens=0, platform=Platform.CPU) == [
        "--worker-cls",
        WORKER_CLASSES["cpu"],
    ]


def test_the_draft_model_goes_into_the_speculative_config() -> None:
    flags = speculation_engine_args(
        "DraftModel",
        "/models/draft",
        max_draft_tokens=5,
        draft_model_revision="abc",
        tensor_parallel_size=2,
        platform=Platform.CPU,
    )
    assert flags[:3] == ["--worker-cls", WORKER_CLASSES["cpu"], "--speculative-config"]
    assert json.loads(flags[3]) == {
        "method": "draft_model",
        "model": "/models/draft",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
        "draft_tensor_parallel_size": 2,
        "revision": "abc",
    }


def test_the_cuda_build_is_held_to_the_v1_runner_and_synchronous_scheduling() -> None:
    flags = speculation_engine_args(None, None, max_draft_tokens=0, platform=Platform.CUDA)
    assert flags == ["--worker-cls", WORKER_CLASSES["cuda"], "--no-async-scheduling"]
    assert engine_environment(Platform.CUDA) == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert engine_environment(Platform.CPU) == {}


def test_every_flag_that_is_set_here_is_owned() -> None:
    flags = speculation_engine_args("DraftModel", "/d", max_draft_tokens=1, platform=Platform.CUDA)
    assert {flag for flag in flags if flag.startswith("--")} <= set(OWNED_FLAGS)


@pytest.mark.parametrize(
    ("method", "model", "tokens", "message"),
    [
        ("NGram", "/d", 4, "draft method 'NGram' is not supported; supported: DraftModel"),
        ("DraftModel", None, 4, "draft method DraftModel needs a draft model"),
        ("DraftModel", "/d", 65, "max_draft_tokens must be between 1 and 64, not 65"),
    ],
)
def test_what_cannot_be_started_is_refused(method: str, model: str | None, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculation_engine_args(method, model, max_draft_tokens=tokens, platform=Platform.CPU)
