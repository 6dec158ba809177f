"""The engine seen from the server's process: built with our statistics, asked for numbers between its steps."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats

from specserve_workers.control.engine import EngineUnavailableError
from specserve_workers.control.runtime_state import RuntimeState
from specserve_workers.control.stats import ServingStats
from specserve_workers.kv.stats import merge_rank_stats

CALL_TIMEOUT_SECONDS: Final = 30.0
STOP_TIMEOUT_SECONDS: Final = 10.0


@asynccontextmanager
async def run_engine(args: Namespace, *, stats: ServingStats) -> AsyncIterator[AsyncLLM]:
    """Starts the engine's processes and stops them at the end."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    engine = AsyncLLM.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[sequence_stats(stats)],
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
    )
    try:
        await engine.reset_mm_cache()
        yield engine
    finally:
        engine.shutdown(timeout=STOP_TIMEOUT_SECONDS)


def sequence_stats(stats: ServingStats) -> Callable[..., StatLoggerBase]:
    """Feeds the engine's exact token counts and times of finished sequences into the pod's statistics.

    They cannot be had from the response: with speculation one chunk of a stream holds several tokens.
    """

    class SequenceStats(StatLoggerBase):
        def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: object,
            iteration_stats: IterationStats | None,
            mm_cache_stats: object = None,
            engine_idx: int = 0,
        ) -> None:
            if iteration_stats is None:
                return
            stats.prompt_tokens += iteration_stats.num_prompt_tokens
            stats.output_tokens += iteration_stats.num_generation_tokens
            for sequence in iteration_stats.finished_requests:
                stats.observe_sequence(
                    output_tokens=sequence.num_generation_tokens,
                    time_per_output_token_ms=sequence.mean_time_per_output_token * 1000,
                )

        def log_engine_initialized(self) -> None:
            pass

    return SequenceStats


class EngineCalls:
    """`specserve_workers.control.engine.Engine` over the engine's calls to its workers."""

    def __init__(self, engine: AsyncLLM, *, has_kv_transfer: bool) -> None:
        self._engine = engine
        self._has_kv_transfer = has_kv_transfer

    async def set_speculation(self, state: RuntimeState) -> None:
        results = await self._call("set_speculation", state.speculation.to_state(), state.generation)
        if not all(result["applied"] for result in results):
            raise EngineUnavailableError(f"the engine kept generation {results[0]['generation']}")

    async def speculation_stats(self) -> Mapping[str, Any]:
        # Every rank counts the same.
        result: Mapping[str, Any] = (await self._call("speculation_stats"))[0]
        return result

    async def kv_stats(self) -> Mapping[str, Any]:
        return merge_rank_stats(await self._call("kv_stats")) if self._has_kv_transfer else {}

    async def _call(self, method: str, *args: object) -> list[Any]:
        try:
            # The limit is ours alone. One that is passed to the engine leaves the answers of slow ranks in its queue,
            # where every later call, steps included, would take them for its own.
            async with asyncio.timeout(CALL_TIMEOUT_SECONDS) as limit:
                results: list[Any] = await self._engine.collective_rpc(method, args=args)
        except Exception as error:
            if limit.expired():
                raise EngineUnavailableError(f"{method}: no answer in {CALL_TIMEOUT_SECONDS:g} s") from None
            # The engine's client raises whatever type the worker raised, or one of several for a dead engine.
            raise EngineUnavailableError(f"{method}: {type(error).__name__}: {error}") from error
        return results
