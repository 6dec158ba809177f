"""OpenAI requests and answers, as far as a fake pod reads and writes them. Pure."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from specserve_workers.frontend.disaggregation import CHAT_COMPLETIONS, TRANSFER_FIELD
from tests.fakes.engine.tokens import chat_text, tokenize

# What the completions endpoint answers with where a request says nothing.
DEFAULT_MAX_TOKENS: Final = 16
_MAX_TOKEN_ID: Final = 2**31 - 1


class RequestError(ValueError):
    """A request that the engine would refuse. The message is for the client."""

    def __init__(self, message: str, *, status: HTTPStatus = HTTPStatus.BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "NotFoundError" if self.status == HTTPStatus.NOT_FOUND else "BadRequestError"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status.value}
        return {"error": error}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One request for completions. `prompts` are token ids; each is answered `n` times."""

    is_chat: bool
    model: str
    prompts: tuple[Sequence[int], ...]
    echo_texts: tuple[str, ...]
    n: int
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    is_stream: bool
    includes_usage: bool
    kv_transfer_params: Mapping[str, Any] | None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def parse_request(path: str, raw: bytes, *, model: str, max_model_tokens: int) -> CompletionRequest:
    """Raises RequestError for what the engine's server would refuse as well."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise RequestError(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object.")
    if body.get("model") not in (None, model):
        message = f"The model `{body['model']}` does not exist."
        raise RequestError(message, status=HTTPStatus.NOT_FOUND, param="model")
    is_chat = path == CHAT_COMPLETIONS
    prompts, texts = _chat_prompt(body) if is_chat else _prompts(body)
    longest = max(len(prompt) for prompt in prompts)
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    default = max_model_tokens - longest if is_chat else DEFAULT_MAX_TOKENS
    max_tokens = _positive(asked, "max_tokens") if asked is not None else default
    if longest + max_tokens > max_model_tokens or max_tokens < 1:
        raise RequestError(
            f"This model's maximum context length is {max_model_tokens} tokens. However, you requested {max_tokens} "
            f"output tokens and your prompt contains {longest}.",
            param="max_tokens",
        )
    stop = body.get("stop") or ()
    options = body.get("stream_options") or {}
    return CompletionRequest(
        is_chat=is_chat,
        model=model,
        prompts=tuple(prompts),
        echo_texts=tuple(texts) if body.get("echo") else ("",) * len(prompts),
        n=_positive(body.get("n") or 1, "n"),
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(str(text) for text in stop),
        ignore_eos=bool(body.get("ignore_eos")),
        is_stream=bool(body.get("stream")),
        includes_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        kv_transfer_params=body.get(TRANSFER_FIELD),
    )


def _positive(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise RequestError(f"{name} must be at least 1, got {value!r}.", param=name)
    return value


def _chat_prompt(body: Mapping[str, Any]) -> tuple[list[Sequence[int]], list[str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: a list of at least one message is required.", param="messages")
    text = chat_text(messages)
    return [tokenize(text)], [text]


def _prompts(body: Mapping[str, Any]) -> tuple[list[Sequence[int]], list[str]]:
    prompt = body.get("prompt")
    several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    prompts: list[Sequence[int]] = []
    texts = []
    for one in several:
        is_ids = isinstance(one, list) and all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in one)
        token_ids = one if is_ids else tokenize(one) if isinstance(one, str) else []
        if not token_ids:
            raise RequestError("prompt: a text or a list of token ids is required.", param="prompt")
        prompts.append(token_ids)
        texts.append(one if isinstance(one, str) else "")
    return prompts, texts


def model_list(model: str, *, max_model_tokens: int) -> dict[str, Any]:
    """The answer of /v1/models."""
    entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "vllm", "root": model}
    return {"object": "list", "data": [{**entry, "parent": None, "max_model_len": max_model_tokens}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int | None]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }


@dataclass(frozen=True, slots=True)
class Answers:
    """Makes the documents that answer one request, under its id."""

    request: CompletionRequest
    request_id: str
    created: int

    def whole(
        self,
        texts: Iterable[str],
        finish_reasons: Iterable[str | None],
        *,
        completion_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """The answer at once, its choices in order."""
        choices = []
        for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True)):
            content = {"message": {"role": "assistant", "content": text}} if self.request.is_chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason, "stop_reason": None})
        document = self._document("chat.completion" if self.request.is_chat else "text_completion", choices)
        document["usage"] = usage(self.request.prompt_tokens, completion_tokens)
        document[TRANSFER_FIELD] = kv_transfer_params
        return document

    def part(self, index: int, text: str, *, finish_reason: str | None = None, is_first: bool = False) -> bytes:
        """One event of a stream."""
        content: dict[str, Any] = {"text": text}
        if self.request.is_chat:
            role = {"role": "assistant"} if is_first else {}
            content = {"delta": {**role, "content": text}}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        return self._event([choice], None)

    def stream_usage(self, completion_tokens: int) -> bytes:
        """The last event before the end, where the client asked for it."""
        return self._event([], usage(self.request.prompt_tokens, completion_tokens))

    def _event(self, choices: list[dict[str, Any]], used: Mapping[str, Any] | None) -> bytes:
        document = self._document("chat.completion.chunk" if self.request.is_chat else "text_completion", choices)
        if self.request.includes_usage:
            document["usage"] = used
        return b"data: " + json.dumps(document).encode() + b"\n\n"

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.request.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }


@dataclass(slots=True)
class StopWatch:
    """Text as it may be shown, given that it ends before the first of some strings."""

    stop: tuple[str, ...]
    text: str = ""
    shown: int = 0
    is_stopped: bool = False

    def add(self, text: str) -> str:
        """Takes in more text, and returns what can be shown of all that is not yet."""
        self.text += text
        found = [at for stop in self.stop if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True
            return self._show(len(self.text))
        # The beginning of a stop string may be at the end.
        held = max((len(stop) - 1 for stop in self.stop), default=0)
        return self._show(max(self.shown, len(self.text) - held))

    def rest(self) -> str:
        """What is still held back when nothing more comes."""
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        part, self.shown = self.text[self.shown : end], end
        return part
