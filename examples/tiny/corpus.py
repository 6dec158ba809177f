"""The text of the tiny models: Python's own standard library (PSF-2.0), as files, tokens and windows."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
WINDOW = 256  # tokens in one training sequence, the leading <|bos|> included
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
# Tests repeat themselves and tables are not code. _sysconfigdata describes the machine that built Python.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "ensurepip")
)
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
# Roles are written as plain comments: a model trained on code has seen those, but no special role tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def source_files() -> tuple[list[Path], list[Path]]:
    """Return the standard library's files as (training, held-out), each sorted by path.

    The split hashes each file's path relative to the library, so that a file falls on the same side of it
    under every Python that has the file.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(SKIPPED_PREFIXES) for part in parts):
            continue
        bucket = hashlib.sha256("/".join(parts).encode()).digest()[0] % 16
        (held_out if bucket == 0 else training).append(path)
    return training, held_out


def read(paths: list[Path]) -> list[str]:
    """Return the text of each file, in order."""
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of ``VOCABULARY`` tokens; it puts one <|bos|> before a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=2048
    )
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_windows(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return the texts as token ids, shaped [windows, WINDOW].

    Every window starts with <|bos|>, as every prompt does; every text ends with <|eos|>. A last, short window
    is left out.
    """
    stream: list[int] = []
    for text in texts:
        stream += tokenizer.encode(text, add_special_tokens=False, verbose=False)
        stream.append(tokenizer.eos_token_id)
    body = WINDOW - 1
    rows = torch.tensor(stream[: len(stream) // body * body]).view(-1, body)
    return torch.cat([torch.full((len(rows), 1), tokenizer.bos_token_id), rows], dim=1)
