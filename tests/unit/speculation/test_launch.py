import json
import os
from pathlib import Path

import pytest

from specserve_workers.vllm import launch
from specserve_workers.vllm.cores import count_cores, cpu_limit
from specserve_workers.vllm.launch import (
    OWNED_FLAGS,
    WORKER_CLASSES,
    Platform,
    prepare_environment,
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
    environ = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    prepare_environment(Platform.CUDA, environ=environ)
    assert environ == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    ("arguments", "threads"),
    [
        ([], "6"),
        (["--dtype", "float32", "--tensor-parallel-size", "2"], "3"),
        (["-tp=4", "--max-num-seqs=2"], "1"),
        (["--tensor_parallel_size", "16"], "1"),
        (["-tp", "many"], "6"),
    ],
)
def test_engines_on_cpus_share_their_machine(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], threads: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1000, 1016)))
    environ = {"SPECSERVE_CPU_LIMIT": "6.5"}
    prepare_environment(Platform.CPU, arguments, environ=environ)
    assert environ == {
        "SPECSERVE_CPU_LIMIT": "6.5",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def test_several_ranks_without_a_limit_are_bound_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cpu_limit", lambda environ: None)
    environ: dict[str, str] = {}
    prepare_environment(Platform.CPU, ["-tp", "2"], environ=environ)
    assert environ == {}


def test_what_the_user_says_of_threads_stays() -> None:
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0-3", "OMP_NUM_THREADS": "3"}
    prepare_environment(Platform.CPU, environ=environ)
    assert (environ["VLLM_CPU_OMP_THREADS_BIND"], environ["OMP_NUM_THREADS"]) == ("0-3", "3")


@pytest.fixture
def four_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight processors, two to a core."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


@pytest.mark.parametrize(
    ("content", "limit", "cores"),
    [
        ("max 100000", None, 4),
        ("250000 100000", 2.5, 2),
        ("50000 100000", 0.5, 1),
        ("1600000 100000", 16.0, 4),
        ("", None, 4),
        ("100000 0", None, 4),
    ],
)
def test_cores_are_counted_within_the_limit_of_the_container(
    four_cores: Path, content: str, limit: float | None, cores: int
) -> None:
    (four_cores / "cpu.max").write_text(content)
    found = cpu_limit(environ={}, cgroup_limit=four_cores / "cpu.max")
    assert found == limit
    assert count_cores(found, cpu_folder=four_cores) == cores


def test_processors_of_unknown_topology_count_as_cores(four_cores: Path, tmp_path: Path) -> None:
    assert count_cores(cpu_folder=tmp_path / "none") == 8


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
