"""How well the draft predicts the target: continuations, acceptance and losses, in float32 arithmetic."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

PROMPT = 128  # tokens given before a continuation, in distillation and in evaluation


def load_model(folder: Path) -> LlamaForCausalLM:
    """Load a model folder for float32 arithmetic, which every CPU does fast."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def text_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy, in nats per token."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def continue_prompts(model: LlamaForCausalLM, prompts: Tensor, length: int, temperature: Tensor) -> Tensor:
    """Return the prompts plus ``length`` tokens written by the model.

    ``temperature`` has one value for each prompt; 0 is greedy.
    """
    pieces, cache = [prompts], None
    for _ in range(length):
        out = model(input_ids=pieces[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1]
        drawn = torch.multinomial((logits / temperature.clamp(min=0.05)[:, None]).softmax(-1), 1)
        pieces.append(torch.where(temperature[:, None] > 0, drawn, logits.argmax(-1, keepdim=True)))
    return torch.cat(pieces, dim=1)


def accepted_per_round(matches: list[bool], k: int) -> list[int]:
    """Return how many of ``k`` proposals each round accepts, given where draft and target agree.

    A round's proposals follow the target's own tokens up to the first one refused, so agreement measured
    along the target's continuation decides the round exactly. The target adds one token after each round.
    """
    rounds, at = [], 0
    while at + k <= len(matches):
        run = 0
        while run < k and matches[at + run]:
            run += 1
        rounds.append(run)
        at += run + 1
    return rounds


@torch.no_grad()
def evaluate(target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: Tensor, length: int = 64) -> dict[str, float]:
    """Measure both models on windows of text that neither has seen.

    ``acceptance`` is the share of the target's greedy tokens that the draft predicts, teacher-forced, over
    ``length`` tokens after each prompt of ``PROMPT`` tokens. A model this small soon repeats itself, which is
    easy to predict: ``acceptance_first_16`` counts the first 16 tokens only. Losses are in nats per token.
    """
    sample = held_out[:: max(1, len(held_out) // 96)][:96]
    written = continue_prompts(target, sample[:, :PROMPT], length, torch.zeros(len(sample)))
    guesses = draft(input_ids=written[:, :-1], use_cache=False).logits.argmax(-1)[:, PROMPT - 1 :]
    truth = written[:, PROMPT:]
    matches = guesses == truth
    rounds = [n for row in matches.tolist() for n in accepted_per_round(row, 4)]
    return {
        "acceptance": round(matches.float().mean().item(), 4),
        "acceptance_first_16": round(matches[:, :16].float().mean().item(), 4),
        "mean_accepted_of_4": round(sum(rounds) / len(rounds), 3),
        "tokens_per_target_step": round(1 + sum(rounds) / len(rounds), 3),
        "distinct_tokens_per_64": round(sum(len(set(row)) for row in truth.tolist()) / len(truth), 1),
        "target_loss": round(text_loss(target, sample).item(), 3),
        "draft_loss": round(text_loss(draft, sample).item(), 3),
        "prompts": len(sample),
    }
