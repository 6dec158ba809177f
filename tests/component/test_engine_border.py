"""What the workers ask of the engine: calls that cannot leave its ranks out of step, and KV that can be moved."""

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from specserve_workers.control.engine import EngineUnavailableError
from specserve_workers.frontend.body_shape import has_more_checks
from specserve_workers.kv.config import ConnectorSettingsError


@pytest.fixture(scope="module")
def vllm() -> Any:
    """The engine's modules, which take seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's own, at import
        pytest.importorskip("vllm")
        from vllm.entrypoints.openai.chat_completion import protocol as chat
        from vllm.entrypoints.openai.completion import protocol as completion
        from vllm.v1 import kv_cache_interface

        from specserve_workers.vllm import connector, engine_client

    return SimpleNamespace(
        specs=kv_cache_interface,
        connector=connector,
        client=engine_client,
        completion=completion.CompletionRequest,
        chat=chat.ChatCompletionRequest,
    )


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


def test_errors_of_the_worst_body_that_is_let_through_are_bounded(vllm: Any) -> None:
    most = 2048
    spare = most - 20  # for the lists and objects around
    ids = [1] * (8 * most)
    bodies: dict[str, tuple[Any, dict[str, Any]]] = {
        "null": (vllm.completion, {"prompt": [1, *[None] * spare]}),
        "negative": (vllm.completion, {"prompt": [-1] * spare}),
        "nested": (vllm.completion, {"prompt": [[None] * (spare // 8)] * 8}),
        "mixed": (vllm.completion, {"prompt": [ids, *[[-1] * (spare // 8)] * 7, None]}),
        "bias": (vllm.completion, {"prompt": ids, "logit_bias": {str(i): "x" for i in range(most)}}),
        "args": (vllm.completion, {"prompt": ids, "vllm_xargs": {str(i): None for i in range(spare)}}),
        "words": (vllm.completion, {"prompt": ids, "bad_words": [1] * spare}),
        "ids": (vllm.completion, {"prompt": ids, "allowed_token_ids": ids, "stop_token_ids": ["x"] * spare}),
        "scalars": (vllm.chat, {"prompt": ids, "allowed_token_ids": ids, "messages": [1] * spare}),
        "objects": (vllm.chat, {"prompt": ids, "messages": [{}] * spare}),
        "documents": (vllm.chat, {"messages": [], "documents": [{str(i): 1 for i in range(spare // 8)}] * 8}),
    }
    for field in ({"prompt": ids}, {"prompt": [ids, [True] * len(ids)]}, {"prompt": [True] * len(ids)}):
        assert not has_more_checks(field, most)
        vllm.completion.model_validate({"model": "m", **field})
    found: dict[str, int] = {}
    for name, (model, body) in bodies.items():
        assert not has_more_checks(body, most), name
        with pytest.raises(ValidationError) as caught:
            model.model_validate({"model": "m", **body})
        found[name] = caught.value.error_count()
    # Errors per value: the engine tries a message as each of the roles, and says what each of them lacks.
    assert {name: count for name, count in found.items() if count > 16 * most} == {}
    assert found["objects"] > 8 * most, "the engine has become milder; so may the limit"
    # What is refused would not be bounded by it: token ids with one that is none, or where they are not wanted.
    for name, (model, body) in {
        "tail": (vllm.completion, {"prompt": [*ids, -1]}),
        "messages": (vllm.chat, {"messages": ids}),
    }.items():
        assert has_more_checks(body, most), name
        with pytest.raises(ValidationError) as caught:
            model.model_validate({"model": "m", **body})
        assert caught.value.error_count() > len(ids)
