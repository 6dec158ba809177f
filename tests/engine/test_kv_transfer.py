"""Prompt KV that crosses the wire gives the same text as KV computed here, and so does KV that fails to cross it.

One engine is producer and consumer at once and pulls from itself over gRPC, so its own text without a transfer is what
every text is compared with: float32, greedy, without a prefix cache. The draft is the target itself: a draft token is
rejected only if the draft's KV has a hole.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from specserve_workers.kv.blocks import KvBlocks
from tests.engine.conftest import Models, prompt_of
from tests.engine.kv_engine import (
    BLOCK_TOKENS,
    LEASE_SECONDS,
    Change,
    KvEngine,
    failing_pulls,
    free_port,
    running_engine,
)

MAX_TOKENS = 24
# 21 prompts of 33-243 tokens: partly filled last blocks, and at both sides of a block's end.
PROMPTS = [prompt_of(100 + i, 33 + 14 * i) for i in range(16)] + [prompt_of(200 + n, n) for n in (64, 65, 95, 96, 97)]


@pytest.fixture(scope="module")
def engine(models: Models, engine_environment: None) -> Iterator[KvEngine]:
    with running_engine(models, with_draft=True) as engine:
        engine.set("Off")
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(engine: KvEngine) -> Iterator[None]:
    free_blocks = engine.free_blocks()
    yield
    engine.settle()
    assert engine.free_blocks() == free_blocks


@pytest.fixture(scope="module")
def texts(engine: KvEngine) -> list[list[int]]:
    """What the engine says by itself, each prompt alone."""
    return [engine.decode([prompt], [None], max_tokens=MAX_TOKENS)[0] for prompt in PROMPTS]


def test_each_prompt_alone_gives_the_same_text(engine: KvEngine, texts: list[list[int]]) -> None:
    change = Change(engine)
    pulled = [engine.decode([prompt], [engine.hold(prompt)], max_tokens=MAX_TOKENS)[0] for prompt in PROMPTS]
    assert pulled == texts
    # All but the last token of each prompt, which is computed to get the next one.
    assert change["loaded_tokens"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert change["remote_prefills"] == len(PROMPTS)
    assert change["served_transfers"] == len(PROMPTS)
    num_blocks = sum(-(-(len(prompt) - 1) // BLOCK_TOKENS) for prompt in PROMPTS)
    block_bytes = 2 * 2 * 2 * BLOCK_TOKENS * 64 * 4  # layers, K and V, heads, tokens, width, float32
    assert change["loaded_bytes"] == change["served_bytes"] == num_blocks * block_bytes
    assert change["fallbacks"] == {}


@pytest.mark.parametrize("size", [3, 7])
def test_concurrent_prompts_give_the_same_texts(engine: KvEngine, texts: list[list[int]], size: int) -> None:
    change = Change(engine)
    for start in range(0, len(PROMPTS), size):
        prompts = PROMPTS[start : start + size]
        assert (
            engine.decode(prompts, [engine.hold(prompt) for prompt in prompts], max_tokens=MAX_TOKENS)
            == texts[start : start + size]
        )
    assert change["remote_prefills"] == len(PROMPTS)


def test_text_changes_if_the_sent_blocks_are_zeroed(
    engine: KvEngine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = KvBlocks.gather
    monkeypatch.setattr(KvBlocks, "gather", lambda *args: bytes(len(gather(*args))))
    changed = engine.decode(PROMPTS[:6], [engine.hold(prompt) for prompt in PROMPTS[:6]], max_tokens=MAX_TOKENS)
    assert all(text != expected for text, expected in zip(changed, texts[:6], strict=True))


def test_every_sequence_of_a_request_pulls(engine: KvEngine, texts: list[list[int]]) -> None:
    change = Change(engine)
    source = engine.hold(PROMPTS[9], pulls=3)
    assert engine.decode([PROMPTS[9]] * 3, [source] * 3, max_tokens=MAX_TOKENS) == [texts[9]] * 3
    assert change["remote_prefills"] == 3
    assert change["fallbacks"] == {}


def test_more_pulls_than_allowed_fall_back(engine: KvEngine, texts: list[list[int]]) -> None:
    change = Change(engine)
    source = engine.hold(PROMPTS[9], pulls=1)
    assert engine.decode([PROMPTS[9]] * 3, [source] * 3, max_tokens=MAX_TOKENS) == [texts[9]] * 3
    assert (change["remote_prefills"], change["fallbacks"]) == (1, {"unknown_lease": 2})


def test_dead_producer_is_made_up_for(engine: KvEngine, texts: list[list[int]]) -> None:
    change = Change(engine)
    dead = {**engine.hold(PROMPTS[5]), "port": free_port()}
    assert engine.decode([PROMPTS[5]], [dead], max_tokens=MAX_TOKENS) == [texts[5]]
    assert (change["remote_prefills"], change["fallbacks"]) == (0, {"connect": 1})
    assert change["loaded_tokens"] == 0


@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("when", ["at once", "after the first layer", "late"])
def test_failed_pulls_among_concurrent_ones_change_no_text(
    engine: KvEngine, texts: list[list[int]], failing: set[int], when: str
) -> None:
    prompts, expected = PROMPTS[6:9], texts[6:9]
    sources = [engine.hold(prompt) for prompt in prompts]
    doomed = {bytes.fromhex(sources[index]["lease"]) for index in failing}
    with failing_pulls(doomed, when=when):
        change = Change(engine)
        # The others are in the middle of their texts when the failure comes late.
        assert engine.decode(prompts, sources, max_tokens=MAX_TOKENS) == expected
    assert change["remote_prefills"] == 3 - len(failing)
    assert sum(change["fallbacks"].values()) == len(failing)


def test_policy_fail_ends_the_request_with_an_error_and_spares_the_others(
    engine: KvEngine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.scheduler, "recompute_kv_load_failures", False)
    prompts = PROMPTS[6:9]
    sources = [engine.hold(prompt) for prompt in prompts]
    with failing_pulls({bytes.fromhex(sources[1]["lease"])}, when="late"):
        got = engine.decode(prompts, sources, max_tokens=MAX_TOKENS)
    assert got == [texts[6], [], texts[8]]
    assert [engine.reasons[name] for name in list(engine.reasons)[-3:]].count("error") == 1


def test_other_prompt_is_not_loaded(engine: KvEngine, texts: list[list[int]]) -> None:
    change = Change(engine)
    other = engine.hold(PROMPTS[4])
    assert len(PROMPTS[4]) != len(PROMPTS[5])
    same_length = engine.hold([*PROMPTS[6][:-1], (PROMPTS[6][-1] + 1) % 512])
    assert engine.decode(PROMPTS[5:7], [other, same_length], max_tokens=MAX_TOKENS) == texts[5:7]
    assert (change["remote_prefills"], change["fallbacks"]) == (0, {"prompt_mismatch": 2})
    engine.settle()
    assert change["expired_leases"] == 0, "the producer is told that nobody comes"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"lease": "x"}, "bad_params"),
        ({"port": "9100"}, "bad_params"),
        ({"host": ["a"]}, "bad_params"),
        ({"prompt_tokens": None}, "bad_params"),
        ({"revision": "other"}, "layout_mismatch"),
        ({"tensor_parallel_size": 2}, "layout_mismatch"),
        ({"num_blocks": 1}, "layout_mismatch"),
        ({"prompt_sha256": "00" * 32}, "prompt_mismatch"),
    ],
)
def test_bad_parameters_never_stop_a_request(
    engine: KvEngine, texts: list[list[int]], changes: dict[str, Any], cause: str
) -> None:
    change = Change(engine)
    source = engine.hold(PROMPTS[3])
    assert engine.decode([PROMPTS[3]], [{**source, **changes}], max_tokens=MAX_TOKENS) == [texts[3]]
    assert change["fallbacks"] == {cause: 1}
    engine.llm.llm_engine.engine_core.get_output()


@pytest.mark.parametrize(
    "params", [{"do_remote_decode": True, "pulls": "x"}, {"do_remote_decode": "yes"}, {"x": [1]}], ids=str
)
def test_bad_wish_to_be_held_holds_nothing(engine: KvEngine, params: dict[str, Any]) -> None:
    name = engine.submit(PROMPTS[0], max_tokens=1, extra_args={"kv_transfer_params": params})
    engine.run()
    assert engine.params[name] is None
    assert engine.kv_stats()["open_leases"] == 0


def test_lease_that_nobody_fetches_expires_and_frees_its_blocks(engine: KvEngine) -> None:
    change, free_blocks = Change(engine), engine.free_blocks()
    engine.hold(PROMPTS[8])
    assert engine.free_blocks() == free_blocks - -(-len(PROMPTS[8]) // BLOCK_TOKENS)
    engine.step_until(lambda: engine.free_blocks() == free_blocks, seconds=LEASE_SECONDS + 10)
    assert change["expired_leases"] == 1


def test_aborted_prefill_holds_nothing(engine: KvEngine) -> None:
    free_blocks = engine.free_blocks()
    name = engine.submit(PROMPTS[8], max_tokens=9, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    engine.step()
    engine.llm.llm_engine.abort_request([name])
    engine.run()
    assert engine.free_blocks() == free_blocks


def test_request_aborted_while_its_pull_runs_leaves_nothing(
    engine: KvEngine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = engine.hold(PROMPTS[8])
    gather = KvBlocks.gather

    def slow_gather(*args: Any) -> bytes:
        time.sleep(0.5)
        return gather(*args)

    change = Change(engine)
    monkeypatch.setattr(KvBlocks, "gather", slow_gather)
    name = engine.submit(
        PROMPTS[8], max_tokens=MAX_TOKENS, extra_args={"kv_transfer_params": source}, name="to-be-aborted"
    )
    engine.step()
    engine.llm.llm_engine.abort_request([name])
    assert engine.decode([PROMPTS[1]], [None], max_tokens=MAX_TOKENS) == [texts[1]]
    engine.settle()
    assert (change["remote_prefills"], change["fallbacks"]) == (0, {})


def test_budget_of_held_blocks_is_kept(
    engine: KvEngine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = engine.scheduler.connector._scheduler.producer._budget
    monkeypatch.setattr(budget, "_max_blocks", 3)
    change = Change(engine)
    engine.hold(PROMPTS[0])  # 33 tokens, 2 blocks
    name = engine.submit(PROMPTS[1], max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    engine.run()
    assert engine.params[name] is None
    engine.step_until(lambda: change["refused_leases"] == 1)
    assert change["open_leases"] == 1


@pytest.mark.parametrize("failing", [set(), {1}, {0, 2}], ids=str)
def test_draft_kv_is_whole_after_pulls_and_after_failed_ones(
    engine: KvEngine, texts: list[list[int]], failing: set[int]
) -> None:
    """The draft is the target: with whole KV every draft token is accepted, and a pull brings none of it."""
    prompts, expected = PROMPTS[3:6], texts[3:6]
    sources = [engine.hold(prompt) for prompt in prompts]
    change, refilled = Change(engine), engine.stats()["refilled_tokens"]
    engine.set("Static", tokens=4)
    before = drafted_and_accepted(engine)
    try:
        with failing_pulls({bytes.fromhex(sources[index]["lease"]) for index in failing}, when="late"):
            assert engine.decode(prompts, sources, max_tokens=MAX_TOKENS) == expected
    finally:
        engine.set("Off")
    drafted, accepted = (now - then for now, then in zip(drafted_and_accepted(engine), before, strict=True))
    assert drafted == accepted > 3 * MAX_TOKENS // 2
    assert (change["remote_prefills"], sum(change["fallbacks"].values())) == (3 - len(failing), len(failing))
    assert engine.stats()["refilled_tokens"] - refilled >= change["loaded_tokens"]


def drafted_and_accepted(engine: KvEngine) -> tuple[int, int]:
    """Draft tokens of policy Static since the engine started."""
    static = next((p for p in engine.stats()["by_policy"] if p["policy"] == "Static"), {})
    return static.get("drafted_tokens", 0), static.get("accepted_tokens", 0)
