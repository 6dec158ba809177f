"""The training loop of the tiny models: AdamW under a cosine; a stopped run goes on from its checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class Schedule:
    """Optimiser steps, windows in each of them, the peak learning rate, and the seed of the order of windows."""

    steps: int
    batch: int
    rate: float
    seed: int


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the peak rate at a step: a short rise, then a cosine down to one twentieth."""
    warmup = min(60, steps // 10 + 1)
    if step < warmup:
        return (step + 1) / warmup
    turn = math.pi * (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(turn))


def fit(
    model: LlamaForCausalLM,
    loss_of: Callable[[Tensor], Tensor],
    windows: int,
    schedule: Schedule,
    checkpoint: Path,
) -> None:
    """Minimise ``loss_of(indices of windows)`` for some steps; go on from ``checkpoint`` if that exists."""
    steps, batch, rate = schedule.steps, schedule.batch, schedule.rate
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    # The whole order is drawn beforehand, so a resumed run sees the batches that an unbroken one would.
    generator = torch.Generator().manual_seed(schedule.seed)
    epochs = steps * batch // windows + 1
    order = torch.cat([torch.randperm(windows, generator=generator) for _ in range(epochs)])
    model.train()
    began, mean = time.monotonic(), None
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * learning_rate(step, steps)
        loss = loss_of(order[step * batch : (step + 1) * batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
            seconds = time.monotonic() - began
            print(f"{checkpoint.stem} {step + 1}/{steps} loss {mean:.3f}, {seconds:.0f} s", flush=True)
    model.eval()
