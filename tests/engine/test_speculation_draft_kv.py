"""The draft's KV has no holes, whatever happened before.

The draft is the target itself, in float32: with whole KV it is always right, so that every draft token is accepted. One
hole anywhere in front of a drafted token and it is wrong sooner or later (the last test shows it).
"""

from collections.abc import Iterator

import pytest

from specserve_workers.kv.foreign_blocks import notify_foreign_blocks
from tests.engine.conftest import Engine, Models, prompt_of, start_engine, stop_engine

BLOCKS = 48  # of 32 tokens: less than the tests' sequences need at once, so some are preempted


@pytest.fixture(scope="module")
def engine(models: Models, engine_environment: None) -> Iterator[Engine]:
    engine = start_engine(
        models,
        draft=models.target,
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    )
    yield engine
    stop_engine(engine)


class Acceptance:
    """Tokens drafted and accepted since it was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._start = self._read()

    def _read(self) -> tuple[int, int]:
        policies = self._engine.stats()["by_policy"]
        return sum(p["drafted_tokens"] for p in policies), sum(p["accepted_tokens"] for p in policies)

    def rejected(self) -> int:
        """Drafts that were not accepted; there must have been some drafts."""
        drafted, accepted = (now - then for now, then in zip(self._read(), self._start, strict=True))
        assert drafted > 0
        return drafted - accepted


def draft_kv(engine: Engine) -> list:
    """The draft's KV tensors, one per layer, blocks first."""
    context = engine.worker.vllm_config.compilation_config.static_forward_context
    names = engine.worker.model_runner.drafter._draft_attn_layer_names
    return [context[name].kv_cache for name in sorted(names)]


def test_all_drafts_are_accepted_when_never_switched(engine: Engine) -> None:
    acceptance = Acceptance(engine)
    engine.set("Static", tokens=4)
    engine.generate([prompt_of(seed, 20 + 9 * seed) for seed in range(6)], max_tokens=40)
    assert acceptance.rejected() == 0


@pytest.mark.parametrize("pattern", [(1, 1), (2, 5), (7, 3), (20, 1)], ids=str)
def test_all_drafts_are_accepted_after_any_switching(engine: Engine, pattern: tuple[int, int]) -> None:
    acceptance = Acceptance(engine)
    off_steps, on_steps = pattern
    for seed in range(6):
        engine.submit(prompt_of(100 + seed, 10 + 40 * seed), max_tokens=60)
    step = 0
    while engine.llm.llm_engine.has_unfinished_requests():
        off = step % (off_steps + on_steps) < off_steps
        engine.set(**({"policy": "Off"} if off else {"policy": "Static", "tokens": 3}))
        engine.step()
        step += 1
    assert acceptance.rejected() == 0


def test_blocks_cached_while_off_are_refilled_for_the_next_request(engine: Engine) -> None:
    prompts = [prompt_of(200 + seed, 150) for seed in range(3)]
    engine.set("Off")
    engine.generate(prompts, max_tokens=4)
    acceptance, before = Acceptance(engine), engine.stats()
    engine.set("Static", tokens=4)
    engine.generate(prompts, max_tokens=40)
    after = engine.stats()
    assert acceptance.rejected() == 0
    # 150 tokens: four full blocks of 32 were cached, without the draft's part.
    assert after["refilled_sequences"] - before["refilled_sequences"] == 3
    assert after["refilled_tokens"] - before["refilled_tokens"] == 3 * 128


def test_blocks_cached_while_on_are_not_fed_again(engine: Engine) -> None:
    prompts = [prompt_of(300 + seed, 150) for seed in range(3)]
    engine.set("Static", tokens=4)
    engine.generate(prompts, max_tokens=4)
    acceptance, before = Acceptance(engine), engine.stats()
    engine.generate(prompts, max_tokens=40)
    assert acceptance.rejected() == 0
    assert engine.stats()["refilled_tokens"] == before["refilled_tokens"]


def test_a_gap_longer_than_the_batch_limit_is_filled_in_pieces(engine: Engine) -> None:
    """900 tokens were computed while off; a pass takes 256."""
    passes: list[int] = []
    drafter = engine.worker.model_runner.drafter
    hook = drafter.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    acceptance = Acceptance(engine)
    engine.set("Off")
    engine.submit(prompt_of(400, 900), max_tokens=60)
    for _ in range(20):
        engine.step()
    assert passes == []
    engine.set("Static", tokens=2)
    engine.step()
    hook.remove()
    refills, drafting = passes[:-2], passes[-2:]
    assert sum(refills) >= 900
    assert max(refills) <= 256
    assert len(refills) == -(-sum(refills) // 256)
    assert max(drafting) <= 4
    engine.run()
    assert acceptance.rejected() == 0


def test_prompts_computed_in_chunks_leave_no_gap(engine: Engine) -> None:
    acceptance, before = Acceptance(engine), engine.stats()
    engine.set("Static", tokens=4)
    engine.generate([prompt_of(500 + seed, 500) for seed in range(2)], max_tokens=40)
    assert acceptance.rejected() == 0
    assert engine.stats()["refilled_tokens"] == before["refilled_tokens"]


@pytest.mark.parametrize("switching", [False, True], ids=["on", "switching"])
def test_all_drafts_are_accepted_after_preemption(engine: Engine, switching: bool) -> None:
    """Eight sequences of up to 380 tokens do not fit into 48 blocks."""
    preemptions: list[str] = []
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **kw: (
        preemptions.append(request.request_id),
        original(request, *args, **kw),
    )[1]
    acceptance = Acceptance(engine)
    for seed in range(8):
        engine.submit(prompt_of(600 + seed, 100 + 20 * seed), max_tokens=140)
    step = 0
    engine.set("Static", tokens=4)
    while engine.llm.llm_engine.has_unfinished_requests():
        if switching:
            off = step % 7 < 4
            engine.set(**({"policy": "Off"} if off else {"policy": "Static", "tokens": 4}))
        engine.step()
        step += 1
    scheduler._preempt_request = original
    assert preemptions
    assert acceptance.rejected() == 0


def test_foreign_blocks_are_refilled(engine: Engine) -> None:
    """As after a pull: the target's KV of a prompt is there, the draft's slots hold nothing of it."""
    prompt = prompt_of(700, 300)
    engine.set("Static", tokens=4)
    engine.generate([prompt], max_tokens=4)
    for tensor in draft_kv(engine):
        tensor.zero_()
    notify_foreign_blocks(range(BLOCKS))
    acceptance, before = Acceptance(engine), engine.stats()
    engine.generate([prompt], max_tokens=40)
    assert acceptance.rejected() == 0
    assert engine.stats()["refilled_tokens"] - before["refilled_tokens"] == 288


def test_holes_are_seen_by_these_tests(engine: Engine) -> None:
    """The same without a word to the ledger: drafts are rejected. So the tests above can fail."""
    prompt = prompt_of(800, 300)
    engine.set("Static", tokens=4)
    engine.generate([prompt], max_tokens=4)
    for tensor in draft_kv(engine):
        tensor.zero_()
    acceptance = Acceptance(engine)
    engine.generate([prompt], max_tokens=40)
    assert acceptance.rejected() > 0
    notify_foreign_blocks(range(BLOCKS))
