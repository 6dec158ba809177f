"""Sends prompts to an OpenAI server, streaming, and measures what a client sees of each request."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: `prompt` (text) or `messages` (chat), exactly one of them."""

    max_tokens: int
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request gave. Times are None where the request failed before they were known."""

    text: str
    error: str | None
    prompt_tokens: int = 0
    output_tokens: int = 0
    time_to_first_token_ms: float | None = None
    time_per_output_token_ms: float | None = None
    seconds: float = 0.0


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a JSONL file with `prompt` or `messages`, and `max_tokens`, a line."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = row.get("messages")
        prompts.append(
            Prompt(
                max_tokens=row.get("max_tokens", 64),
                prompt=row.get("prompt"),
                messages=tuple(messages) if messages else None,
            )
        )
    return prompts


def request_of(prompt: Prompt, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for `prompt`: greedy, streamed, with usage numbers at the end."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompt.messages is not None:
        return "/v1/chat/completions", body | {"messages": list(prompt.messages)}
    return "/v1/completions", body | {"prompt": prompt.prompt}


async def server_sent_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of an event stream, up to `[DONE]`."""
    async for raw in response.content:
        line = raw.strip()
        if line.startswith(b"data:") and line != b"data: [DONE]":
            yield json.loads(line[5:])


async def send(session: aiohttp.ClientSession, base_url: str, model: str, *, prompt: Prompt) -> Outcome:
    """Sends one request and reads it to its end. Never raises for what a server or network can do."""
    path, body = request_of(prompt, model)
    begin = time.perf_counter()
    first = last = None
    parts: list[str] = []
    usage: dict[str, int] = {}
    error = None
    try:
        async with session.post(base_url + path, json=body) as response:
            if response.status != 200:
                return Outcome(text="", error=f"HTTP {response.status}: {(await response.text())[:300]}")
            async for event in server_sent_events(response):
                if "error" in event:
                    error = str(event["error"])
                    break
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    delta = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    if delta:
                        last = time.perf_counter()
                        first = first or last
                        parts.append(delta)
    except (aiohttp.ClientError, TimeoutError, OSError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    tokens = usage.get("completion_tokens", 0)
    if error is None and not tokens:
        error = "the stream ended without a usage record"
    return Outcome(
        text="".join(parts),
        error=error,
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=tokens,
        time_to_first_token_ms=(first - begin) * 1e3 if first else None,
        time_per_output_token_ms=(last - first) * 1e3 / (tokens - 1) if first and last and tokens > 1 else None,
        seconds=time.perf_counter() - begin,
    )


async def send_all(
    base_url: str,
    model: str,
    *,
    prompts: Sequence[Prompt],
    concurrency: int,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
    timeout_seconds: float = 1800,
) -> list[Outcome]:
    """Sends all prompts, at most `concurrency` at a time; outcomes in the order of the prompts."""
    slots = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: Prompt) -> Outcome:
            async with slots:
                outcome = await send(session, base_url, model, prompt=prompt)
            on_done(outcome)
            return outcome

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
