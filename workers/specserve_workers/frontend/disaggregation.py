"""Which prompts are prefilled elsewhere, with what body, and what a prefill pod's answer must hold. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

COMPLETIONS: Final = "/v1/completions"
CHAT_COMPLETIONS: Final = "/v1/chat/completions"
# Only these know how to carry a prompt to another pod; every other path is served by this pod's engine alone.
DISAGGREGATED_PATHS: Final = frozenset({COMPLETIONS, CHAT_COMPLETIONS})

TRANSFER_FIELD: Final = "kv_transfer_params"
# Objects of a request whose content reaches the engine as it is, where transfer parameters would be obeyed as well.
_EXTRA_FIELDS: Final = ("vllm_xargs", "extra_args", "sampling_params")
# One prefill may be fetched once for each of the `n` sequences of a request.
MAX_PULLS: Final = 128

# Fields that say what to do after the prompt: without meaning for a prefill, and some are refused with one token.
_AFTER_PROMPT: Final = frozenset(
    {
        "best_of",
        "include_stop_str_in_output",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "min_tokens",
        "n",
        "response_format",
        "return_token_ids",
        "stop",
        "stop_token_ids",
        "stream_options",
        "structured_outputs",
        "suffix",
        "top_logprobs",
        "use_beam_search",
        TRANSFER_FIELD,
    }
)
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_LEASE: Final = re.compile(r"[0-9a-f]{32}")


class TransferAnswerError(ValueError):
    """A prefill pod's answer that no transfer can be made from. Names the field."""


class NotHeldError(TransferAnswerError):
    """The prefill pod answered but holds nothing: it has no room for another prompt."""


class RevisionMismatchError(TransferAnswerError):
    """The prefill pod runs another target revision: its KV means something else."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What a prefill pod answers: where the prompt's KV waits and under which token."""

    fields: Mapping[str, Any]

    @property
    def lease(self) -> bytes:
        return bytes.fromhex(self.fields["lease"])

    @property
    def rank_addresses(self) -> list[str]:
        """`host:port` of every tensor-parallel rank's KV server."""
        host, port = self.fields["host"], self.fields["port"]
        host = f"[{host}]" if ":" in host else host
        return [f"{host}:{port + rank}" for rank in range(self.fields["tensor_parallel_size"])]


def is_remote(path: str, body: Mapping[str, Any], *, block_size_tokens: int) -> bool:
    """Whether the prompt of this request is worth and safe to prefill on another pod.

    Not so for: several prompts in one request; results that need logits of prompt positions (`echo`,
    `prompt_logprobs`); prompts given as embeddings; beam search, which forks sequences from within the engine;
    messages with images, audio or files, whose tokens are not all of the prompt; prompts that cannot fill one KV
    block. Text of fewer bytes than a block has tokens is such a prompt: no tokenizer makes more tokens than bytes.
    """
    if path not in DISAGGREGATED_PATHS:
        return False
    if body.get("echo") or body.get("prompt_embeds") or body.get("use_beam_search"):
        return False
    if body.get("prompt_logprobs") is not None:
        return False
    if not 1 <= pulls_of(body) <= MAX_PULLS:
        return False
    length = _chat_bytes(body) if path == CHAT_COMPLETIONS else _prompt_units(body.get("prompt"))
    return length is not None and length >= block_size_tokens


def pulls_of(body: Mapping[str, Any]) -> int:
    """How many sequences will fetch the prompt's KV; 0 if the request does not say so in a valid way."""
    n = body.get("n")
    if n is None:
        return 1
    return n if isinstance(n, int) and not isinstance(n, bool) and n >= 1 else 0


def _prompt_units(prompt: Any) -> int | None:
    """Length of a single prompt in bytes of text or in token ids; None for several prompts or anything else."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return len(prompt.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    return None


def _chat_bytes(body: Mapping[str, Any]) -> int | None:
    """Bytes of all text of a conversation, tool descriptions included; the template adds to it."""
    messages = body.get("messages")
    if not isinstance(messages, list) or _has_media(messages):
        return None
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in _texts([messages, body.get("tools")]))


def _has_media(messages: list[Any]) -> bool:
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and not _is_text(part.get("type", "text")) for part in parts)


def _is_text(part_type: Any) -> bool:
    return isinstance(part_type, str) and part_type in _TEXT_PARTS


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())


def prefill_body(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for the prefill pod: the same prompt, one token, no stream.

    The end-of-text token is ignored: only a sequence that ends by its length is held for a transfer. The sampled token
    itself is thrown away; the decode pod computes the last prompt position again.
    """
    derived = {key: value for key, value in body.items() if key not in _AFTER_PROMPT}
    derived["max_completion_tokens" if path == CHAT_COMPLETIONS else "max_tokens"] = 1
    return derived | {
        "stream": False,
        "temperature": 0,
        "ignore_eos": True,
        TRANSFER_FIELD: {"do_remote_decode": True, "pulls": pulls_of(body)},
    }


def parse_transfer_answer(answer: Any, *, revision: str) -> TransferParams:
    """Takes the transfer parameters out of a prefill pod's answer.

    Raises:
        NotHeldError: the pod prefilled and gave the blocks away.
        RevisionMismatchError: `revision` is not this pod's target revision.
        TransferAnswerError: parameters are missing or no field of the agreed form.
    """
    if not isinstance(answer, dict):
        raise TransferAnswerError("the answer is not a JSON object")
    fields = answer.get(TRANSFER_FIELD)
    if fields is None:
        raise NotHeldError(f"{TRANSFER_FIELD}: none")
    if not isinstance(fields, dict):
        raise TransferAnswerError(f"{TRANSFER_FIELD}: not an object")
    if fields.get("do_remote_prefill") is not True:
        raise TransferAnswerError("do_remote_prefill: not true")
    if not isinstance(fields.get("lease"), str) or not _LEASE.fullmatch(fields["lease"]):
        raise TransferAnswerError("lease: not 32 lower-case hexadecimal digits")
    if not isinstance(fields.get("host"), str) or not fields["host"]:
        raise TransferAnswerError("host: missing")
    for name, most in (("port", 65535), ("tensor_parallel_size", 64), ("prompt_tokens", 2**31), ("num_blocks", 2**31)):
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise TransferAnswerError(f"{name}: {value!r} is not in 1-{most}")
    if fields.get("revision") != revision:
        raise RevisionMismatchError(f"revision: {fields.get('revision')!r} is not this pod's {revision!r}")
    return TransferParams(fields)


def find_transfer_params(body: Any) -> list[Any]:
    """Every place of a request body at which the engine would take transfer parameters from."""
    found: list[Any] = []
    pending = [body]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if item.get(TRANSFER_FIELD) is not None:
                found.append(item[TRANSFER_FIELD])
            pending.extend(item.get(name) for name in _EXTRA_FIELDS)
    return found


def is_prefill_order(params: Any) -> bool:
    """Whether transfer parameters are what a decode pod sends to a prefill pod, and nothing more."""
    if not isinstance(params, dict) or set(params) != {"do_remote_decode", "pulls"}:
        return False
    pulls = params["pulls"]
    return params["do_remote_decode"] is True and type(pulls) is int and 1 <= pulls <= MAX_PULLS
