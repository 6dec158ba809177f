"""KL divergence of the target's next-token distribution from the draft's."""

import math
from typing import Final

import torch

# Probabilities below it count as this much, so that a token the draft never proposes costs at most 18.4 nats
# (released code of arXiv 2509.01083).
PROBABILITY_FLOOR: Final = 1e-8


def kl_divergence_nats(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, *, temperatures: torch.Tensor | None
) -> torch.Tensor:
    """KL(target || draft) of each row, in nats, float32.

    Both logits have shape [rows, vocabulary], any floating type; they are not changed. `temperatures` has shape [rows];
    0 means greedy and counts as 1, as in verification, where greedy requests compare the unscaled logits. None: all
    greedy. A row with NaN or with +inf gives NaN.
    """
    if temperatures is not None:
        scale = torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(-1)
        target_logits, draft_logits = target_logits / scale, draft_logits / scale
    floor = math.log(PROBABILITY_FLOOR)
    target = target_logits.log_softmax(-1, dtype=torch.float32).clamp_min_(floor)
    draft = draft_logits.log_softmax(-1, dtype=torch.float32).clamp_min_(floor)
    return torch.linalg.vecdot(target.exp(), target - draft)
