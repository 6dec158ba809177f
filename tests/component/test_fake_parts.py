"""The pure parts of a fake pod."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_workers.speculation.settings import PolicyName
from tests.fakes.engine.behaviour import Behaviour, BehaviourError, LiveBehaviour, start_behaviour
from tests.fakes.engine.blocks import KvBlocks, Layer, layer_content, prompt_blocks
from tests.fakes.engine.drafting import Drafting
from tests.fakes.engine.openai_requests import StopWatch
from tests.fakes.engine.tokens import VOCABULARY_SIZE, answer_words, tokenize

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=80)


@given(st.text(max_size=300))
def test_text_has_no_more_tokens_than_bytes(text: str) -> None:
    ids = tokenize(text)
    assert len(ids) <= len(text.encode("utf-8", "surrogatepass"))
    assert all(0 <= token < VOCABULARY_SIZE for token in ids)
    assert tokenize(text) == ids


@given(TOKENS, st.integers(0, 20), st.integers(0, 20))
def test_a_longer_answer_begins_with_the_shorter_one(prompt: list[int], short: int, more: int) -> None:
    first = list(itertools.islice(answer_words(prompt), short))
    assert list(itertools.islice(answer_words(prompt), short + more))[:short] == first
    other = list(itertools.islice(answer_words(prompt, index=1), 40))
    assert other != list(itertools.islice(answer_words(prompt), 40))


@given(TOKENS, TOKENS)
def test_prompts_share_blocks_just_as_far_as_their_tokens(prompt: list[int], other: list[int]) -> None:
    size = 4
    blocks, others = (prompt_blocks(ids, block_size_tokens=size) for ids in (prompt, other))
    assert len(blocks) == -(-len(prompt) // size)
    for number, (block, another) in enumerate(zip(blocks, others, strict=False), start=1):
        assert (block == another) == (prompt[: number * size] == other[: number * size])


def test_blocks_are_where_they_were_written() -> None:
    layers = {name: Layer(40) for name in ("b", "a")}
    cache = KvBlocks(layers, num_blocks=9)
    data = layer_content([b"x", b"y"], layer_index=1, block_bytes=40)
    cache.scatter(1, [7, 2], data)
    assert [layout.name for layout in cache.layouts] == ["a", "b"]
    assert cache.gather(1, [2]) + cache.gather(1, [7]) == data[40:] + data[:40]
    assert cache.gather(0, [7]) == bytes(40)
    with pytest.raises(ValueError, match="79 bytes for 2 blocks"):
        cache.scatter(0, [1, 2], data[:-1])


@given(
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 50)), min_size=1, max_size=30),
)
def test_just_the_share_asked_for_is_accepted(ratio: float, steps: list[tuple[int, int]]) -> None:
    drafting = Drafting(started_max_tokens=8)
    settings = {"policy": "Static", "cap": "None", "minTokens": 0, "maxTokens": 8, "staticTokens": 8}
    drafting.apply(settings, 1)
    accepted = sum(drafting.step(length, ratio, times=times) for length, times in steps)
    (counts,) = drafting.stats()["by_policy"]
    drafted = sum(length * times for length, times in steps)
    assert (counts["drafted_tokens"], counts["accepted_tokens"]) == (drafted, accepted)
    assert abs(accepted - ratio * drafted) <= 1
    assert counts["verified_sequences"] == sum(times for _, times in steps)
    pairs = zip(counts["accepted_by_position"], counts["drafted_by_position"], strict=True)
    assert all(taken <= made for taken, made in pairs)


def test_draft_lengths_follow_the_policy_and_older_settings_change_nothing() -> None:
    drafting = Drafting(started_max_tokens=6)
    settings = {"policy": "DSDE", "cap": "Mean", "minTokens": 2, "maxTokens": 35, "staticTokens": 0}
    assert drafting.apply(settings, 3)["in_force"]["maxTokens"] == 6
    assert [drafting.length(ratio) for ratio in (0.0, 0.5, 1.0)] == [2, 4, 6]
    assert drafting.apply(settings | {"policy": "Off"}, 2)["applied"] is False
    assert drafting.settings.policy is PolicyName.DSDE
    drafting.apply(settings | {"policy": "Off"}, 4)
    assert drafting.length(1.0) == 0


@given(st.text("ab", max_size=40), st.text("ab", min_size=1, max_size=4), st.integers(1, 5))
def test_streamed_text_ends_before_its_stop_string(text: str, stop: str, size: int) -> None:
    watch = StopWatch((stop,))
    shown = ""
    for start in range(0, len(text), size):
        shown += watch.add(text[start : start + size])
        assert stop not in shown
        if watch.is_stopped:
            break
    shown += watch.rest()
    assert shown == text.split(stop, 1)[0]
    assert watch.is_stopped == (stop in text)


def test_a_bad_behaviour_names_its_source(tmp_path: Path) -> None:
    for argv, environ, message in (
        (["--", "--fake", "{"], {}, "--fake: "),
        ([], {"SPECSERVE_FAKE": '{"tokens": 1}'}, "SPECSERVE_FAKE: tokens: no field"),
        ([], {"SPECSERVE_FAKE": '{"prefill": {"kv_cache_blocks": 0}}'}, "kv_cache_blocks: 0 is below 1"),
        ([], {"SPECSERVE_FAKE_FILE": str(tmp_path / "none")}, "none cannot be read: No such file"),
    ):
        with pytest.raises(BehaviourError, match=message):
            start_behaviour("prefill", argv, environ=environ)


def test_the_doomed_request_is_counted_from_when_it_was_ordered() -> None:
    live = LiveBehaviour(Behaviour())
    assert not live.is_doomed()
    live.update({"crash_after_requests": 2})
    assert [live.is_doomed() for _ in range(3)] == [False, True, False]
    with pytest.raises(BehaviourError, match=r"error_ratio: -1\.0 is below 0"):
        live.update({"error_ratio": -1, "crash_after_requests": 1})
    assert not live.is_doomed()
    live.reset()
    assert live.now == Behaviour()
