"""What the workers ask of the engine: calls that cannot leave its ranks out of step, and KV that can be moved."""

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specserve_workers.control.engine import EngineUnavailableError
from specserve_workers.kv.config import ConnectorSettingsError


@pytest.fixture(scope="module")
def vllm() -> Any:
    """The engine's modules, which take seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's own, at import
        pytest.importorskip("vllm")
        from vllm.v1 import kv_cache_interface

        from specserve_workers.vllm import connector, engine_client

    return SimpleNamespace(specs=kv_cache_interface, connector=connector, client=engine_client)


class FakeEngine:
    """Answers when it is let go, and keeps the timeouts it was given."""

    def __init__(self, *, hangs: bool) -> None:
        self.timeouts: list[float | None] = []
        self.is_cancelled = False
        self._hangs = hangs

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> list[dict[str, Any]]:
        self.timeouts.append(timeout)
        if self._hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise
        return [{"method": method}]


async def test_calls_carry_no_timeout_into_the_engine(vllm: Any) -> None:
    # The engine would raise there but leave the ranks' answers in their queue, for the next call to find.
    engine = FakeEngine(hangs=False)
    assert await vllm.client.EngineCalls(engine, has_kv_transfer=False).speculation_stats() == {
        "method": "speculation_stats"
    }
    assert engine.timeouts == [None]


async def test_call_without_an_answer_ends_at_the_client(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.client, "CALL_TIMEOUT_SECONDS", 0.01)
    engine = FakeEngine(hangs=True)
    with pytest.raises(EngineUnavailableError, match=r"speculation_stats: no answer in 0\.01 s"):
        await vllm.client.EngineCalls(engine, has_kv_transfer=False).speculation_stats()
    assert (engine.timeouts, engine.is_cancelled) == ([None], True)


def cache_config(spec: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


def checked_spec(vllm: Any, spec: Any) -> Any:
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
    return vllm.connector._attention_spec(config, cache_config(spec))


SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


@pytest.mark.parametrize("name", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_full_attention_is_accepted_alone_and_in_a_group_of_sizes(vllm: Any, name: str) -> None:
    kind = getattr(vllm.specs, name)
    spec = kind(**SHAPE)
    assert checked_spec(vllm, spec) is spec
    assert (
        checked_spec(vllm, SimpleNamespace(kv_cache_specs={"a": spec, "b": kind(**SHAPE | {"head_size": 32})})) is spec
    )


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("SlidingWindowSpec", {"sliding_window": 64}),
        ("SlidingWindowMLASpec", {"sliding_window": 64}),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 64}),
        ("RSWASpec", {"rswa_window": 64}),
        ("SinkFullAttentionSpec", {"sink_len": 32}),
        ("CrossAttentionSpec", {}),
    ],
)
def test_attention_that_does_not_keep_the_whole_prompt_is_refused_by_name(
    vllm: Any, name: str, extra: dict[str, int]
) -> None:
    spec = getattr(vllm.specs, name)(**SHAPE, **extra)
    full = vllm.specs.FullAttentionSpec(**SHAPE)
    for refused in (spec, SimpleNamespace(kv_cache_specs={"a": full, "b": spec})):
        with pytest.raises(ConnectorSettingsError, match=f"full attention.*not {name}"):
            checked_spec(vllm, refused)
