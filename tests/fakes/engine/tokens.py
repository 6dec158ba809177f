"""Tokens and text that follow from the prompt alone, so that every pod gives the same answer to it. Pure."""

import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from specserve_workers.kv.params import prompt_sha256

VOCABULARY_SIZE: Final = 32_000
# About four bytes of text to a token, as in real tokenizers.
_TOKEN: Final = re.compile(r"\s?\w{1,4}|\W")
_WORDS: Final = tuple(
    """
    the a one some every pod block token draft target prompt cache lease chunk stream batch step queue peer port file
    reads writes keeps moves holds asks sends waits counts serves pulls gives takes finds meets makes and or then while
    before after until over under with from into near slow fast long short new old first last next same other whole
    """.split()  # noqa: SIM905 - longer as a list than all else here
)
_WORDS_PER_DIGEST: Final = 16


def tokenize(text: str) -> list[int]:
    """Token ids of a text. Equal pieces of text have equal ids; there is no way back."""
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) % VOCABULARY_SIZE for piece in _TOKEN.findall(text)]


def answer_words(prompt_token_ids: Sequence[int], *, index: int = 0) -> Iterator[str]:
    """The endless answer to a prompt, one word with its leading space for each token.

    `index` tells the `n` answers to one prompt apart.
    """
    seed = prompt_sha256(prompt_token_ids) + index.to_bytes(4, "little")
    number = 0
    while True:
        digest = hashlib.sha256(seed + number.to_bytes(4, "little")).digest()
        for position in range(0, 2 * _WORDS_PER_DIGEST, 2):
            word = int.from_bytes(digest[position : position + 2], "little") % len(_WORDS)
            yield f" {_WORDS[word]}"
        number += 1


def chat_text(messages: Sequence[object]) -> str:
    """What a chat template makes of a conversation."""
    lines = []
    for message in messages:
        role = message.get("role", "user") if isinstance(message, dict) else "user"
        content = message.get("content") if isinstance(message, dict) else message
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        lines.append(f"<{role}>{content or ''}\n")
    return "".join(lines) + "<assistant>"
