"""Two tensor-parallel ranks: one plan, the first rank's, whatever the second would have decided."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specserve_workers.kv.foreign_blocks import notify_foreign_blocks
from specserve_workers.speculation.policy import VerifiedStep
from specserve_workers.speculation.settings import PolicyName
from tests.engine.conftest import Engine, Models, PlainReference, start_engine, stop_engine


class LengthsByRank:
    """On the first rank lengths by the first letters of the request's name, on others always 7."""

    name = PolicyName.STATIC
    needs_kld = False

    def __init__(self, rank: int, lengths: dict[str, int]) -> None:
        self.rank = rank
        self.wanted = lengths
        self.verified: list[tuple[str, int]] = []

    def observe(self, step: VerifiedStep) -> None:
        self.verified += zip(step.sequence_ids, step.drafted_tokens.tolist(), strict=True)

    def lengths(self, sequence_ids: Sequence[str]) -> list[int]:
        if self.rank:
            return [7] * len(sequence_ids)
        return [next(n for p, n in self.wanted.items() if i.startswith(p)) for i in sequence_ids]

    def forget(self, sequence_id: str) -> None:
        """Nothing is kept."""


def disagree(worker: Any, lengths: dict[str, int]) -> None:
    """Runs in each rank: another policy in each, and blocks that only the first takes for foreign."""
    worker.hooks.controller.policy = LengthsByRank(worker.rank, lengths)
    if worker.rank == 0:
        notify_foreign_blocks(range(40))


def verified(worker: Any) -> list[tuple[str, int]]:
    """Runs in each rank: what was verified there."""
    return worker.hooks.controller.policy.verified


@pytest.fixture(scope="module")
def engine(plain: PlainReference, models: Models) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        engine = start_engine(models, draft=models.draft, tensor_parallel_size=2, distributed_executor_backend="mp")
        yield engine
        stop_engine(engine)


@pytest.mark.parametrize("policy", ["Off", "Static", "DSDE"])
def test_greedy_text_is_that_of_one_rank(engine: Engine, plain: PlainReference, policy: str) -> None:
    engine.set(policy, tokens=4, cap="Mean")
    texts = engine.generate(plain.prompts, max_tokens=48)
    same = sum(text == other for text, other in zip(texts, plain.texts, strict=True))
    # Sums over two ranks round differently: a near tie may fall the other way, in few of 24 texts.
    assert same >= 22
    if policy == "Off":
        engine.outputs["off"] = texts
    else:
        assert texts == engine.outputs["off"]


def test_both_ranks_follow_the_first_rank(engine: Engine, plain: PlainReference) -> None:
    lengths = {"zero": 0, "two": 2, "five": 5}
    engine.set("Off")
    engine.generate(plain.prompts[:6], max_tokens=2)
    engine.set("Static", tokens=5)
    engine.llm.collective_rpc(disagree, args=(lengths,))
    names = [
        engine.submit(prompt, max_tokens=24, name=f"{name}-{i}")
        for i, (prompt, name) in enumerate(zip(plain.prompts[:12], 4 * ["zero", "two", "five"], strict=True))
    ]
    engine.run()
    assert [engine.outputs.pop(name) for name in names] == [text[:24] for text in engine.outputs["off"][:12]]
    first, second = engine.llm.collective_rpc(verified)
    assert first == second
    by_name = {name: {n for i, n in first if i.startswith(name)} for name in lengths}
    assert by_name == {"zero": set(), "two": {2}, "five": {5}}
