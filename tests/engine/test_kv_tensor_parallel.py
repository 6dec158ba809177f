"""Two tensor-parallel ranks each pull their own shard; if one fails, the prompt is computed again on both."""

from collections.abc import Iterator
from typing import Any

import pytest

from specserve_workers.kv.client import KvClient
from specserve_workers.kv.errors import StalledError
from specserve_workers.kv.stats import merge_rank_stats
from tests.engine.conftest import Models, prompt_of
from tests.engine.kv_engine import BLOCK_TOKENS, KvEngine, running_engine

MAX_TOKENS = 16
PROMPTS = [prompt_of(300 + i, 40 + 37 * i) for i in range(6)]
FETCH = KvClient.fetch


def let_pulls_fail(worker: Any, rank: int | None) -> None:
    """Runs in each rank: from now on pulls fail on one of them, after some garbage was written; None: on none."""

    def failing_fetch(self: KvClient, order: Any, **kwargs: Any) -> int:
        layer = self._blocks.layouts[0]
        self._blocks.scatter(0, order.block_ids, b"\x7f" * (layer.block_bytes * len(order.block_ids)))
        raise StalledError("test")

    KvClient.fetch = failing_fetch if worker.rank == rank else FETCH  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def engine(models: Models, engine_environment: None) -> Iterator[KvEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with running_engine(models, tensor_parallel_size=2, distributed_executor_backend="mp") as engine:
            yield engine


@pytest.fixture(scope="module")
def texts(engine: KvEngine) -> list[list[int]]:
    """What the engine says by itself, each prompt alone."""
    return [engine.decode([prompt], [None], max_tokens=MAX_TOKENS)[0] for prompt in PROMPTS]


def stats(engine: KvEngine) -> dict[str, Any]:
    return merge_rank_stats(engine.llm.collective_rpc("kv_stats"))


def test_both_shards_arrive_and_requests_are_counted_once(engine: KvEngine, texts: list[list[int]]) -> None:
    before = stats(engine)
    for start in (0, 3):
        prompts = PROMPTS[start : start + 3]
        sources = [engine.hold(prompt) for prompt in prompts]
        assert engine.decode(prompts, sources, max_tokens=MAX_TOKENS) == texts[start : start + 3]
    after = stats(engine)
    assert after["remote_prefills"] - before["remote_prefills"] == len(PROMPTS)
    assert after["loaded_tokens"] - before["loaded_tokens"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    num_blocks = sum(-(-(len(prompt) - 1) // BLOCK_TOKENS) for prompt in PROMPTS)
    whole_block_bytes = 2 * 2 * 2 * BLOCK_TOKENS * 64 * 4  # layers, K and V, heads, tokens, width, float32
    assert after["loaded_bytes"] - before["loaded_bytes"] == num_blocks * whole_block_bytes
    assert after["fallbacks"] == {}
    engine.settle()


@pytest.mark.parametrize("rank", [0, 1])
def test_failure_on_one_rank_is_made_up_for_on_both(engine: KvEngine, texts: list[list[int]], rank: int) -> None:
    before = stats(engine)
    sources = [engine.hold(prompt) for prompt in PROMPTS[:3]]
    engine.llm.collective_rpc(let_pulls_fail, args=(rank,))
    try:
        assert engine.decode(PROMPTS[:3], sources, max_tokens=MAX_TOKENS) == texts[:3]
    finally:
        engine.llm.collective_rpc(let_pulls_fail, args=(None,))
    after = stats(engine)
    assert after["remote_prefills"] == before["remote_prefills"]
    assert after["fallbacks"].get("stalled", 0) - before["fallbacks"].get("stalled", 0) == 3
    engine.settle()  # the failing rank fetched nothing: its leases run out
