"""At a temperature above 0, the distribution of the text with speculation is the target's own.

The first tokens of many requests are compared with their exact probabilities, which the model gives without any
sampling. Pearson's chi-square over the pairs (first, second) and (second, third) that are expected at least 5 times,
all others pooled; the bound is the 1 - 1e-4 quantile, so that a right engine fails with a probability of 2e-4 per test
for a fresh seed. The seed is fixed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from specserve_workers.vllm.compat import is_expansion_broken
from tests.engine.conftest import Engine, Models, prompt_of, start_engine, stop_engine

TEMPERATURE = 0.6
REQUESTS = 4000
FALSE_ALARM = 1e-4
PROMPT = prompt_of(1, 12)


@pytest.fixture(scope="module")
def engine(models: Models, engine_environment: None) -> Iterator[Engine]:
    engine = start_engine(models, draft=models.draft, max_num_seqs=64)
    yield engine
    stop_engine(engine)


@pytest.fixture(scope="module")
def exact(models: Models) -> "Exact":
    return Exact(models)


class Exact:
    """Probabilities of the target, from its weights."""

    def __init__(self, models: Models) -> None:
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(models.target)
        self.first = self._next([PROMPT])[0]
        size = len(self.first)
        self.second = self._next([[*PROMPT, token] for token in range(size)])
        self.first_and_second = self.first[:, None] * self.second

    def third(self, first: int) -> np.ndarray:
        """P(third | first, second) for every second token; shape [vocabulary, vocabulary]."""
        return self._next([[*PROMPT, first, token] for token in range(len(self.first))])

    def _next(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        with torch.inference_mode():
            logits = self._model(torch.tensor(texts)).logits[:, -1].double()
        return (logits / TEMPERATURE).softmax(-1).numpy()


def chi_square_tail(pairs: Counter, probabilities: np.ndarray) -> float:
    """Probability of a chi-square statistic at least this large; `probabilities` has the shape of the pairs' range."""
    total = pairs.total()
    cells = np.argwhere(probabilities * total >= 5)
    expected = np.array([probabilities[tuple(cell)] * total for cell in cells])
    seen = np.array([pairs[tuple(cell.tolist())] for cell in cells], dtype=float)
    assert len(cells) >= 10, "too few cells to tell anything"
    expected = np.append(expected, total - expected.sum())
    seen = np.append(seen, total - seen.sum())
    statistic = torch.tensor(((seen - expected) ** 2 / expected).sum())
    freedom = torch.tensor(len(seen) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def sample(engine: Engine, *, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    return engine.generate([PROMPT] * REQUESTS, max_tokens=3, temperature=TEMPERATURE)


def tails(engine: Engine, exact: Exact, *, seed: int) -> tuple[float, float]:
    """Chi-square tails of (first, second), and of (second, third) after the most frequent first token."""
    texts = sample(engine, seed=seed)
    usual = int(exact.first.argmax())
    later = Counter((second, third) for first, second, third in texts if first == usual)
    return (
        chi_square_tail(Counter((first, second) for first, second, _ in texts), exact.first_and_second),
        chi_square_tail(later, exact.second[usual][:, None] * exact.third(usual)),
    )


@pytest.mark.parametrize(
    "policy",
    [{"policy": "Off"}, {"policy": "Static", "tokens": 4}, {"policy": "DSDE", "cap": "Mean", "least": 2}],
    ids=lambda policy: policy["policy"],
)
def test_distribution_is_the_targets(engine: Engine, exact: Exact, policy: dict) -> None:
    engine.set(**policy)
    assert min(tails(engine, exact, seed=11)) > FALSE_ALARM


def test_distribution_is_wrong_with_the_engines_own_expansion(
    engine: Engine, exact: Exact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect that `compat` repairs, put back: the test above would see it."""
    from vllm.v1.sample import rejection_sampler

    def engines_expansion(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        """What the repair replaces: the engine's kernel into fresh memory."""
        expanded = x.new_empty(num_tokens)
        rejection_sampler._expand(expanded, x, cu_num_tokens, replace_from, replace_to)
        return expanded

    assert is_expansion_broken(engines_expansion)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", engines_expansion)
    engine.set("Static", tokens=4)
    assert min(tails(engine, exact, seed=11)) < FALSE_ALARM


def test_half_greedy_batches_keep_greedy_text_and_measure_divergence(engine: Engine) -> None:
    """Greedy and sampled requests in one batch are verified each in their own way."""
    prompts = [prompt_of(seed, 30) for seed in range(8)]
    engine.set("Off")
    plain = engine.generate(prompts, max_tokens=24)
    engine.set("DSDE", cap="Mean", least=1)
    sampled = [engine.submit(PROMPT, max_tokens=24, temperature=1.0) for _ in range(8)]
    greedy = [engine.submit(prompt, max_tokens=24) for prompt in prompts]
    engine.run()
    assert [engine.outputs.pop(name) for name in greedy] == plain
    assert all(len(engine.outputs.pop(name)) == 24 for name in sampled)
    dsde = next(p for p in engine.stats()["by_policy"] if p["policy"] == "DSDE")
    assert dsde["kld_positions"] == dsde["drafted_tokens"]
