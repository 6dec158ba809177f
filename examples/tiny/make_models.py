#!/usr/bin/env python3
"""Make the tiny target and draft models of the demo and of the tests, from Python's own standard library.

Run without options to train both models on one CPU core (about forty minutes) and to write

* ``models/target``: a Llama model of about 5 million parameters,
* ``models/draft``: a Llama model of about 1 million parameters, distilled on the target,
* ``models/README.md``: what they are, with the measured numbers.

``--evaluate`` only measures the models already written: it prints one JSON object and writes nothing.
Training can be stopped at any time; the next run goes on from the last checkpoint in ``--work-dir``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from acceptance import PROMPT, continue_prompts, evaluate, load_model, text_loss
from corpus import VOCABULARY, WINDOW, make_tokenizer, make_windows, read, source_files
from torch import Tensor
from training import Schedule, fit
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
TOP = 16  # entries of the target's distribution kept per token; the rest carries little mass


@dataclass(frozen=True)
class Recipe:
    """How much to train: steps are optimiser steps, windows are sequences of ``WINDOW`` tokens."""

    seed: int = 20240917
    target_steps: int = 2600
    target_batch: int = 4
    target_rate: float = 2e-3
    draft_steps: int = 1000
    draft_batch: int = 8
    draft_rate: float = 4e-3
    written_windows: int = 1024  # windows half text, half by the target, on which the draft learns


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int, mlp: int, layers: int, heads: int) -> LlamaForCausalLM:
    """Return an untrained model with two key-value heads of 64, so that it splits over two devices.

    ``hidden`` and ``mlp`` are widths in elements. The narrow draft shares its input and output
    embeddings, which would otherwise be most of its parameters.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=hidden < 256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def write_windows(target: LlamaForCausalLM, windows: Tensor, count: int, seed: int) -> Tensor:
    """Return ``count`` windows whose first ``PROMPT`` tokens are text and whose rest the target wrote.

    Three in four are greedy, which is what acceptance is measured on; the others add some variety.
    """
    torch.manual_seed(seed)
    prompts = windows[torch.randperm(len(windows))[:count], :PROMPT]
    written = []
    for number, chunk in enumerate(prompts.split(128)):
        temperature = torch.where(torch.arange(len(chunk)) % 4 == 3, 0.6, 0.0)
        written.append(continue_prompts(target, chunk, WINDOW - PROMPT, temperature))
        print(f"written by the target: {number * 128 + len(chunk)}/{len(prompts)}", flush=True)
    return torch.cat(written)


@torch.no_grad()
def label_windows(target: LlamaForCausalLM, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's ``TOP`` likeliest next tokens, and their probabilities, at each token."""
    tokens, shares = [], []
    for chunk in windows.split(16):
        top = target(input_ids=chunk, use_cache=False).logits.softmax(-1).topk(TOP)
        tokens.append(top.indices.to(torch.int16))
        shares.append((top.values / top.values.sum(-1, keepdim=True)).to(torch.float16))
    return torch.cat(tokens), torch.cat(shares)


def distillation_loss(draft: LlamaForCausalLM, ids: Tensor, tokens: Tensor, shares: Tensor) -> Tensor:
    """Return the cross-entropy with the target's distribution plus that with its likeliest token.

    Both are in nats per token. The first is the divergence from the target up to a constant, the second is
    what greedy acceptance depends on.
    """
    logp = draft(input_ids=ids, use_cache=False).logits.log_softmax(-1).gather(-1, tokens.long())
    return -(shares.float() * logp).sum(-1).mean() - logp[..., 0].mean()


def round_weights(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Round the weights, in place, to the bfloat16 numbers that are saved and served."""
    # Casting the model instead would also round its rotary frequencies, which no server does.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def train_target(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, windows: Tensor, work: Path) -> LlamaForCausalLM:
    """Train the target on the text."""
    torch.manual_seed(recipe.seed)
    target = make_model(tokenizer, hidden=256, mlp=768, layers=4, heads=4)
    fit(
        target,
        lambda index: text_loss(target, windows[index]),
        len(windows),
        Schedule(recipe.target_steps, recipe.target_batch, recipe.target_rate, recipe.seed + 1),
        work / "target.pt",
    )
    return round_weights(target)


def train_draft(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, windows: Tensor, target: LlamaForCausalLM, work: Path
) -> LlamaForCausalLM:
    """Distil the draft on the target, over text and over what the target itself writes after it."""
    labelled = work / "labels.pt"
    if not labelled.exists():
        ids = write_windows(target, windows, recipe.written_windows, recipe.seed + 2)
        torch.save((ids, *label_windows(target, ids)), labelled.with_suffix(".new"))
        labelled.with_suffix(".new").rename(labelled)
    ids, tokens, shares = torch.load(labelled)
    torch.manual_seed(recipe.seed + 3)
    draft = make_model(tokenizer, hidden=128, mlp=384, layers=2, heads=2)
    fit(
        draft,
        lambda index: distillation_loss(draft, ids[index], tokens[index], shares[index]),
        len(ids),
        Schedule(recipe.draft_steps, recipe.draft_batch, recipe.draft_rate, recipe.seed + 4),
        work / "draft.pt",
    )
    return round_weights(draft)


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder with bfloat16 weights and the tokenizer."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    copy.generation_config = GenerationConfig(**special)
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # Servers differ in the release of transformers they bring; this name is known to all of them.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def describe(folder: Path, recipe: Recipe, numbers: dict[str, float]) -> str:
    """Return the text of ``models/README.md`` for the models in ``folder``."""
    rows = []
    for name in ("target", "draft"):
        model = load_model(folder / name)
        config, weights = model.config, folder / name / "model.safetensors"
        rows.append(
            f"| {name} | {sum(p.numel() for p in model.parameters()):,} | {config.hidden_size} | "
            f"{config.num_hidden_layers} | {config.num_attention_heads} / {config.num_key_value_heads} | "
            f"{weights.stat().st_size:,} | `{hashlib.sha256(weights.read_bytes()).hexdigest()}` |"
        )
    return README.format(
        rows="\n".join(rows),
        vocabulary=VOCABULARY,
        version=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        recipe="\n".join(f"| {name} | {value} |" for name, value in asdict(recipe).items()),
        total=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6,
        numbers="\n".join(f"| {name} | {value} |" for name, value in numbers.items()),
    )


README = """# Tiny models

Two small Llama models for the demo and the tests of speculative serving. They share one byte-level BPE
tokenizer of {vocabulary} tokens, write something like Python, and are of no use for anything else. Each has
two key-value heads of 64 elements and an even number of attention heads, so that it also splits over two
devices.

| model | parameters | hidden | layers | heads / kv heads | weights, bytes | SHA-256 of `model.safetensors` |
|---|---|---|---|---|---|---|
{rows}

Weights are bfloat16; the draft shares its input and output embeddings. The folder takes {total:.1f} MB.
A chat template writes each message as a comment, `# user: ...`, for servers that have a chat endpoint.

## How they were made

By `make_models.py`, one folder up, on one CPU core in about forty minutes. The target is trained on the
text; the draft is distilled on the target, over windows of which the first half is text and the second half
is what the target writes after it. One file in sixteen, chosen by a hash of its path, is held out of
everything, the tokenizer included. `../prompts.jsonl` is cut from such files by `make_prompts.py`.

The text is the standard library of Python {version}, without tests and tables; training ran on PyTorch
{torch}. The seeds are fixed, but another PyTorch or processor gives other weights: measure them again.

| setting | value |
|---|---|
{recipe}

## Measured, on held-out files

Greedy, in float32 arithmetic on the bfloat16 weights, 64 tokens after each prompt of 128. `acceptance` is the
share of the target's tokens that the draft predicts along the target's own continuation; `mean_accepted_of_4`
is the mean number of proposals accepted per round of 4; losses are in nats per token. Greedy continuations of
the target soon repeat themselves, and repetition is easy to predict, so acceptance is higher than real models
reach: `acceptance_first_16` counts the first 16 tokens only, `distinct_tokens_per_64` shows how much repeats.
`python make_models.py --evaluate` prints them again.

| measure | value |
|---|---|
{numbers}

## Licences

* The text that the models were trained on, and the prompts cut from it: PSF-2.0 (Copyright Python Software
  Foundation).
* The weights and tokenizer files in this folder: Apache-2.0, as the rest of this repository.
"""


def publish(new: Path) -> None:
    """Put a finished folder in the place of ``MODELS`` by renaming, so that no reader sees half a model."""
    old = MODELS.with_name(".models.old")
    shutil.rmtree(old, ignore_errors=True)
    if MODELS.exists():
        MODELS.rename(old)
    new.rename(MODELS)
    shutil.rmtree(old, ignore_errors=True)


def train(recipe: Recipe, work: Path) -> None:
    """Train both models and write ``MODELS``."""
    # Checkpoints of another recipe must not be taken for this one's.
    work = work / hashlib.sha256(json.dumps(asdict(recipe)).encode()).hexdigest()[:12]
    work.mkdir(parents=True, exist_ok=True)
    training, held_out = (read(paths) for paths in source_files())
    tokenizer = make_tokenizer(training)
    windows = make_windows(tokenizer, training)
    print(f"{len(training)} files, {windows.numel()} tokens", flush=True)
    target = train_target(recipe, tokenizer, windows, work)
    draft = train_draft(recipe, tokenizer, windows, target, work)
    numbers = evaluate(target, draft, make_windows(tokenizer, held_out))
    new = MODELS.with_name(".models.new")
    shutil.rmtree(new, ignore_errors=True)
    for name, model in (("target", target), ("draft", draft)):
        save_model(model, tokenizer, new / name)
    (new / "README.md").write_text(describe(new, recipe, numbers))
    publish(new)
    print(json.dumps(numbers))


def main() -> None:
    """Read the options, then train or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    work = Path(tempfile.gettempdir()) / "tiny-models"
    parser.add_argument("--evaluate", action="store_true", help="measure the models in place, write nothing")
    parser.add_argument("--work-dir", type=Path, default=work, help="folder of the checkpoints")
    for name in ("target_steps", "draft_steps", "written_windows"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Recipe, name))
    # Models this small gain little from a second thread, and the sums depend on the number of threads.
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.evaluate:
        tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
        windows = make_windows(tokenizer, read(source_files()[1]))
        print(json.dumps(evaluate(load_model(MODELS / "target"), load_model(MODELS / "draft"), windows)))
        return
    chosen = {name: getattr(options, name) for name in Recipe.__annotations__ if hasattr(options, name)}
    train(Recipe(**chosen), options.work_dir)


if __name__ == "__main__":
    main()
