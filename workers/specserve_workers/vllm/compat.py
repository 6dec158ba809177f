"""Repairs of the engine's own defects that would change text, each applied only where the defect is really there."""

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeats each request's value once per draft token: `x` [requests] -> [num_tokens], same type.

    `cu_num_tokens` [requests] is the running sum of draft tokens. Values equal to `replace_from` become `replace_to`.
    Takes the arguments of the engine's function of this name.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts.long(), output_size=num_tokens)


def is_expansion_broken(expand: Any) -> bool:
    """Whether `expand` loses values that are not int64; `expand` is called like `expand_batch_to_tokens` above.

    The CPU build of vLLM 0.32.0 fills an int64 copy of its output and drops it, so requests with a temperature are
    verified against uninitialised memory: wrong text without any error.
    """
    values = torch.tensor([0.5, 0.0, 2.0])
    running_sum = torch.tensor([2, 3, 6], dtype=torch.int32)
    expected = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0, 2.0])
    got = expand(values, running_sum, 6, replace_from=0, replace_to=1)
    return not torch.equal(got, expected)


def repair_expansion() -> bool:
    """Replaces the engine's expansion on the CPU if it is broken; True if it was."""
    from vllm.v1.sample import rejection_sampler

    if not is_expansion_broken(rejection_sampler.expand_batch_to_tokens):
        return False
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    logger.info("replaced the engine's broken expansion of sampling parameters (temperature with speculation)")
    return True


def replace_placeholder_drafts(scheduled_drafts: dict[str, list[int]]) -> None:
    """Gives placeholder drafts (-1) a real token id, in place.

    The scheduler pads a request that starts with one token to compute (all others loaded or cached) to a full
    speculative row of -1. For sampled requests the engine looks up the target's probability of that token: memory of
    another row. Any fixed token keeps the output distribution exact: it is accepted with its target probability, and
    otherwise a token is drawn from the rest.
    """
    for request_id, tokens in scheduled_drafts.items():
        if tokens and tokens[0] < 0:
            scheduled_drafts[request_id] = [0] * len(tokens)
