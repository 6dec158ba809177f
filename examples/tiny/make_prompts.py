#!/usr/bin/env python3
"""Write ``prompts.jsonl``: requests for the tiny models, cut from files that they were not trained on."""

from __future__ import annotations

import json
from pathlib import Path

from corpus import read, source_files
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
COMPLETIONS = 28
CHAT_REQUESTS = (
    "Write a function that opens a file, reads every line, and returns the lines without trailing space. "
    "A line that is empty, or that starts with a number sign, is left out. The function takes the name of "
    "the file and the encoding, which is utf-8 if none is given.",
    "Write a class Stack with the methods push, pop and peek. The constructor takes an iterable of the first "
    "items. The methods pop and peek raise IndexError if the stack is empty. Give the class a __len__ and a "
    "__repr__ as well, and a docstring for every public method.",
    "Complete this code:\n\ndef parse_headers(fp):\n    headers = []\n    while True:\n"
    "        line = fp.readline(_MAXLINE + 1)\n        if len(line) > _MAXLINE:\n"
    "            raise LineTooLong('header line')\n",
    "Complete this code:\n\nclass Queue:\n    def __init__(self, maxsize=0):\n"
    "        self.maxsize = maxsize\n        self._init(maxsize)\n"
    "        self.mutex = threading.Lock()\n\n    def qsize(self):\n",
)


def cut(tokenizer: PreTrainedTokenizerFast, text: str, start: int, room: int) -> str:
    """Return the whole lines of ``text`` from character ``start`` on that fit into ``room`` tokens."""
    kept = ""
    for line in text[start:].splitlines(keepends=True):
        if kept and len(tokenizer.encode(kept + line)) > room:
            break
        kept += line
    return kept


def make_prompts(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[dict[str, object]]:
    """Return completion prompts of 60 to 400 tokens, and chat requests; a prompt starts at a definition."""
    starts = [
        (text, at)
        for text in texts
        for at in range(len(text) - 3000)
        if text.startswith(("\ndef ", "\n    def ", "\nclass "), at)
    ]
    lines: list[dict[str, object]] = []
    for number in range(COMPLETIONS):
        text, at = starts[number * len(starts) // COMPLETIONS]
        prompt = cut(tokenizer, text, at + 1, 100 + (number * 131) % 290)
        lines.append({"prompt": prompt, "max_tokens": 48 + 16 * (number % 4)})
    for number, request in enumerate(CHAT_REQUESTS):
        messages = [{"role": "user", "content": request}]
        lines.append({"messages": messages, "max_tokens": 48 + 16 * (number % 4)})
    return lines


def main() -> None:
    """Write the file next to this script."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "models" / "target")
    prompts = make_prompts(tokenizer, read(source_files()[1]))
    (HERE / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))


if __name__ == "__main__":
    main()
