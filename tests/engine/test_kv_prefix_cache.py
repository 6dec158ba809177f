"""A pull beside the local prefix cache: only what is missing is loaded, and a failure spares who shares the prefix.

A cache salt keeps what the engine caches as a producer apart from what it caches as a consumer.
"""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import Models, prompt_of
from tests.engine.kv_engine import BLOCK_TOKENS, Change, KvEngine, failing_pulls, running_engine

MAX_TOKENS = 24
PREFIX = prompt_of(1, 3 * BLOCK_TOKENS)
PROMPTS = [PREFIX + prompt_of(10 + i, 40 + 7 * i) for i in range(4)]


@pytest.fixture(scope="module")
def engine(models: Models, engine_environment: None) -> Iterator[KvEngine]:
    with running_engine(models, enable_prefix_caching=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(engine: KvEngine) -> list[list[int]]:
    """What the engine says by itself, nothing cached: every prompt has a salt of its own."""
    texts = []
    for index, prompt in enumerate(PROMPTS):
        name = engine.start(prompt, None, salt=f"alone-{index}", max_tokens=MAX_TOKENS)
        engine.run()
        texts.append(engine.outputs[name])
    return texts


def test_only_blocks_that_are_not_cached_are_loaded(engine: KvEngine, texts: list[list[int]]) -> None:
    salt = "partly cached"
    first = engine.start(PROMPTS[0], None, salt=salt, max_tokens=MAX_TOKENS)
    engine.run()
    source = engine.hold(PROMPTS[1])
    change = Change(engine)
    second = engine.start(PROMPTS[1], source, salt=salt, max_tokens=MAX_TOKENS)
    engine.run()
    assert [engine.outputs[first], engine.outputs[second]] == texts[:2]
    assert change["loaded_tokens"] == len(PROMPTS[1]) - 1 - len(PREFIX)
    missing_blocks = -(-(len(PROMPTS[1]) - 1) // BLOCK_TOKENS) - 3
    assert change["loaded_bytes"] == missing_blocks * 2 * 2 * 2 * BLOCK_TOKENS * 64 * 4
    engine.settle()


def test_loaded_blocks_are_cached_for_the_next_request(engine: KvEngine, texts: list[list[int]]) -> None:
    salt = "loaded then cached"
    for _ in range(2):
        source = engine.hold(PROMPTS[2])
        change = Change(engine)
        name = engine.start(PROMPTS[2], source, salt=salt, max_tokens=MAX_TOKENS)
        engine.run()
        assert engine.outputs[name] == texts[2]
    last_block_tokens = (len(PROMPTS[2]) - 1) % BLOCK_TOKENS
    assert change["loaded_tokens"] == last_block_tokens
    engine.settle()


def test_wholly_cached_prompt_is_not_loaded_and_gives_its_lease_up(engine: KvEngine) -> None:
    prompt = [*PREFIX, 7]  # all but the last token are whole blocks
    change = Change(engine)
    for source in (None, engine.hold(prompt)):
        engine.start(prompt, source, salt="wholly cached", max_tokens=4)
        engine.run()
    engine.settle()
    assert (change["remote_prefills"], change["fallbacks"], change["expired_leases"]) == (0, {}, 0)


@pytest.mark.parametrize("when", ["at once", "after the first layer", "late"])
def test_failed_pull_spares_running_requests_that_share_its_prefix(
    engine: KvEngine, texts: list[list[int]], when: str
) -> None:
    salt = f"shared {when}"
    sources = [engine.hold(prompt) for prompt in PROMPTS]
    change = Change(engine)
    with failing_pulls({bytes.fromhex(sources[index]["lease"]) for index in (1, 3)}, when=when):
        names = [engine.start(PROMPTS[0], sources[0], salt=salt, max_tokens=MAX_TOKENS)]
        for _ in range(400):
            if engine.num_output_tokens(names[0]) >= 4:
                break
            engine.step()
        # Now the first request runs on cached blocks that the others start with.
        names += [
            engine.start(prompt, source, salt=salt, max_tokens=MAX_TOKENS)
            for prompt, source in zip(PROMPTS[1:], sources[1:], strict=True)
        ]
        engine.run()
    assert [engine.outputs[name] for name in names] == texts
    assert (change["remote_prefills"], sum(change["fallbacks"].values())) == (2, 2)
    engine.settle()
