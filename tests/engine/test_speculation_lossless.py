"""Speculation changes how text is made, never the text; and it does the work the policy asks for, no more."""

from collections.abc import Iterator, Sequence

import pytest

from specserve_workers.speculation.policy import Static, VerifiedStep
from specserve_workers.speculation.settings import PolicyName
from tests.engine.conftest import Engine, Models, PlainReference, start_engine, stop_engine

POLICIES = {
    "off": {"policy": "Off"},
    "static-1": {"policy": "Static", "tokens": 1},
    "static-4": {"policy": "Static", "tokens": 4},
    "static-8": {"policy": "Static", "tokens": 8},
    "dsde": {"policy": "DSDE", "cap": "Mean"},
    "dsde-uncapped": {"policy": "DSDE", "cap": "None", "least": 2},
}


class LengthsByPrefix:
    """Lengths by the first letters of the request's name; keeps what was verified."""

    name = PolicyName.STATIC
    needs_kld = False

    def __init__(self, lengths: dict[str, int]) -> None:
        self.wanted = lengths
        self.verified: list[tuple[str, int]] = []

    def observe(self, step: VerifiedStep) -> None:
        self.verified += zip(step.sequence_ids, step.drafted_tokens.tolist(), strict=True)

    def lengths(self, sequence_ids: Sequence[str]) -> list[int]:
        return [next(n for p, n in self.wanted.items() if i.startswith(p)) for i in sequence_ids]

    def forget(self, sequence_id: str) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def engine(plain: PlainReference, models: Models) -> Iterator[Engine]:
    engine = start_engine(models, draft=models.draft)
    yield engine
    stop_engine(engine)


@pytest.fixture
def draft_forwards(engine: Engine) -> Iterator[list[int]]:
    """Number of tokens of every pass of the draft model."""
    passes: list[int] = []
    hook = engine.worker.model_runner.drafter.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    yield passes
    hook.remove()


def test_prompts_are_worth_testing(engine: Engine, plain: PlainReference) -> None:
    """Texts differ and wander, and the draft is neither always right nor always wrong."""
    assert len({tuple(text) for text in plain.texts}) == len(plain.texts)
    assert all(len(set(text)) >= 10 for text in plain.texts)
    before = engine.stats()
    engine.set("Static", tokens=4)
    engine.generate(plain.prompts, max_tokens=48)
    drafted, accepted = _growth(before, engine.stats(), "Static")
    assert 0.2 < accepted / drafted < 0.9, accepted / drafted


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_in_a_batch_is_that_of_an_engine_without_drafter(
    engine: Engine, plain: PlainReference, policy: str
) -> None:
    engine.set(**POLICIES[policy])
    assert engine.generate(plain.prompts, max_tokens=48) == plain.texts


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_alone_is_that_of_an_engine_without_drafter(
    engine: Engine, plain: PlainReference, policy: str
) -> None:
    engine.set(**POLICIES[policy])
    texts = engine.generate_alone(plain.prompts, max_tokens=16)
    assert texts == [text[:16] for text in plain.texts]


def test_greedy_text_survives_changes_of_policy_between_any_two_steps(engine: Engine, plain: PlainReference) -> None:
    names = [engine.submit(prompt, max_tokens=48) for prompt in plain.prompts]
    order = ["dsde", "off", "static-8", "static-1", "off", "dsde", "static-4", "dsde-uncapped"]
    step = 0
    while engine.llm.llm_engine.has_unfinished_requests():
        if step % 3 == 0:
            engine.set(**POLICIES[order[step // 3 % len(order)]])
        engine.step()
        step += 1
    assert [engine.outputs.pop(name) for name in names] == plain.texts


def test_off_runs_no_draft_forward(engine: Engine, plain: PlainReference, draft_forwards: list[int]) -> None:
    engine.set("Off")
    before = engine.stats()
    engine.generate(plain.prompts[:8], max_tokens=16)
    after = engine.stats()
    assert draft_forwards == []
    assert after["draft_forwards"] == before["draft_forwards"]
    assert after["steps_without_draft"] - before["steps_without_draft"] == 16


def test_each_sequence_gets_its_own_length_in_one_batch(
    engine: Engine, plain: PlainReference, draft_forwards: list[int]
) -> None:
    policy = LengthsByPrefix({"zero": 0, "one": 1, "three": 3, "six": 6})
    engine.set("Static", tokens=6)
    engine.worker.hooks.controller.policy = policy
    names = [
        engine.submit(prompt, max_tokens=33, name=f"{name}-{i}")
        for i, (prompt, name) in enumerate(zip(plain.prompts, 6 * ["zero", "one", "three", "six"], strict=True))
    ]
    engine.run()
    assert [engine.outputs.pop(name) for name in names] == [text[:33] for text in plain.texts]
    by_name = {name: {n for i, n in policy.verified if i.startswith(name)} for name in policy.wanted}
    assert by_name == {"zero": set(), "one": {1}, "three": {3}, "six": {6}}
    assert draft_forwards


def test_passes_are_those_of_the_longest_sequence_of_the_batch(
    engine: Engine, plain: PlainReference, draft_forwards: list[int]
) -> None:
    policy = LengthsByPrefix({"two": 2, "five": 5})
    engine.set("Static", tokens=5)
    engine.worker.hooks.controller.policy = policy
    engine.submit(plain.prompts[0], max_tokens=24, name="two-a")
    engine.step()
    assert len(draft_forwards) == 2
    engine.submit(plain.prompts[1], max_tokens=24, name="five-a")
    draft_forwards.clear()
    engine.step()
    assert len(draft_forwards) == 5
    engine.run()
    engine.worker.hooks.controller.policy = Static(0)
    draft_forwards.clear()
    engine.generate(plain.prompts[:2], max_tokens=8)
    assert draft_forwards == []


def test_counted_forwards_are_the_real_ones(engine: Engine, plain: PlainReference, draft_forwards: list[int]) -> None:
    before = engine.stats()["draft_forwards"]
    engine.set("Off")
    names = [engine.submit(prompt, max_tokens=40) for prompt in plain.prompts[:6]]
    for _ in range(6):
        engine.step()
    engine.set("DSDE", cap="Mean")
    engine.run()
    assert {name: engine.outputs.pop(name) for name in names}
    assert engine.stats()["draft_forwards"] - before == len(draft_forwards) > 0


def test_dsde_measures_the_divergence_of_every_verified_position(engine: Engine, plain: PlainReference) -> None:
    before = engine.stats()
    engine.set("DSDE", cap="Mean", least=1)
    engine.generate(plain.prompts, max_tokens=32)
    after = engine.stats()
    drafted, _ = _growth(before, after, "DSDE")
    measured = _of(after, "DSDE")["kld_positions"] - _of(before, "DSDE")["kld_positions"]
    nats = _of(after, "DSDE")["kld_sum_nats"] - _of(before, "DSDE")["kld_sum_nats"]
    assert measured == drafted > 0
    assert 0.01 < nats / measured < 5.0


def test_a_request_up_to_the_models_maximum_length_keeps_its_text(engine: Engine) -> None:
    """Near the maximum the engine stops asking the drafter; drafts must stop too, and the text go on."""
    prompt = list(range(1, 501)) * 2
    engine.set("Off")
    plain = engine.generate([prompt], max_tokens=24)
    engine.set("Static", tokens=8)
    assert engine.generate([prompt], max_tokens=24) == plain
    assert len(plain[0]) == 24


def test_older_settings_are_not_applied(engine: Engine) -> None:
    engine.set("Static", tokens=3)
    state = {"policy": "Off", "cap": "None", "minTokens": 0, "maxTokens": 8, "staticTokens": 0}
    answer = engine.call("set_speculation", state, engine.generation - 1)
    assert answer["applied"] is False
    assert answer["generation"] == engine.generation
    assert answer["in_force"]["policy"] == "Static"


def _of(stats: dict, policy: str) -> dict:
    empty = {"drafted_tokens": 0, "accepted_tokens": 0, "kld_positions": 0, "kld_sum_nats": 0.0}
    return next((p for p in stats["by_policy"] if p["policy"] == policy), empty)


def _growth(before: dict, after: dict, policy: str) -> tuple[int, int]:
    """Tokens drafted and accepted between two readings."""
    old, new = _of(before, policy), _of(after, policy)
    return (
        new["drafted_tokens"] - old["drafted_tokens"],
        new["accepted_tokens"] - old["accepted_tokens"],
    )
