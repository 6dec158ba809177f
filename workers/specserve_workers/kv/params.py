"""The transfer parameters that travel with requests, and the hash that proves two prompts equal.

They pass through clients' hands only by mistake (the decode pod's middleware refuses a client's own), but are
read here as if they came from one: every field is checked for type and bounds.
"""

import hashlib
import ipaddress
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from specserve_workers.kv.errors import BadParamsError
from specserve_workers.kv.lease import TOKEN_BYTES

MAX_PULLS: Final = 1024
MAX_PROMPT_TOKENS: Final = 1 << 24
MAX_TENSOR_PARALLEL_SIZE: Final = 1024
_SHA256_BYTES: Final = 32
_DNS_NAME: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.I)


def prompt_sha256(token_ids: Sequence[int]) -> bytes:
    """Return the SHA-256 of the token ids as little-endian int32: 32 bytes."""
    ids = array("i", token_ids)
    if ids.itemsize != 4:  # pragma: no cover - every platform this runs on has 32-bit ints
        raise RuntimeError("C int is not 32 bits wide here")
    return hashlib.sha256(_little_endian(ids)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDecode:
    """What the decode pod asks of the producer: hold this prompt's blocks for `pulls` pulls (1..1024)."""

    pulls: int

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> Self | None:
        """Read the request's parameters; None where they ask for nothing. Raises `BadParamsError`."""
        if not isinstance(params, Mapping) or params.get("do_remote_decode") is not True:
            return None
        return cls(pulls=_int(params, "pulls", low=1, high=MAX_PULLS, default=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """Where a prompt's KV lies. Made by the producer, read by the consumer.

    Attributes:
        lease: 16 bytes.
        host, port: where rank 0 serves; rank r serves on `port + r`.
        tensor_parallel_size: the producer's.
        revision: the producer's target revision.
        prompt_tokens, prompt_sha256: of the prompt as the producer tokenised it.
        num_blocks: blocks held, all layers alike.
    """

    lease: bytes
    host: str
    port: int
    tensor_parallel_size: int
    revision: str
    prompt_tokens: int
    prompt_sha256: bytes
    num_blocks: int

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> Self | None:
        """Read the request's parameters; None where they name no remote prefill.

        Raises `BadParamsError` naming the first field that is missing, mistyped or out of bounds.
        """
        if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
            return None
        size = _int(params, "tensor_parallel_size", low=1, high=MAX_TENSOR_PARALLEL_SIZE)
        return cls(
            lease=_hex(params, "lease", num_bytes=TOKEN_BYTES),
            host=_host(params, "host"),
            port=_int(params, "port", low=1, high=65535 - size + 1),
            tensor_parallel_size=size,
            revision=_text(params, "revision", max_chars=256),
            prompt_tokens=_int(params, "prompt_tokens", low=1, high=MAX_PROMPT_TOKENS),
            prompt_sha256=_hex(params, "prompt_sha256", num_bytes=_SHA256_BYTES),
            num_blocks=_int(params, "num_blocks", low=1, high=MAX_PROMPT_TOKENS),
        )

    def to_params(self) -> dict[str, Any]:
        """Return the JSON form, as in the contract "KV transfer"."""
        return {
            "do_remote_prefill": True,
            "lease": self.lease.hex(),
            "host": self.host,
            "port": self.port,
            "tensor_parallel_size": self.tensor_parallel_size,
            "revision": self.revision,
            "prompt_tokens": self.prompt_tokens,
            "prompt_sha256": self.prompt_sha256.hex(),
            "num_blocks": self.num_blocks,
        }


def _little_endian(ids: "array[int]") -> bytes:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _int(params: Mapping[str, Any], name: str, *, low: int, high: int, default: int | None = None) -> int:
    value = params.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadParamsError(f"kv_transfer_params.{name}: expected an integer in {low}..{high}")
    return value


def _text(params: Mapping[str, Any], name: str, *, max_chars: int) -> str:
    value = params.get(name)
    if not isinstance(value, str) or len(value) > max_chars:
        raise BadParamsError(f"kv_transfer_params.{name}: expected a string of at most {max_chars} characters")
    return value


def _hex(params: Mapping[str, Any], name: str, *, num_bytes: int) -> bytes:
    text = _text(params, name, max_chars=2 * num_bytes)
    if not re.fullmatch(r"[0-9a-f]*", text) or len(text) != 2 * num_bytes:
        raise BadParamsError(f"kv_transfer_params.{name}: expected {2 * num_bytes} lower-case hex digits")
    return bytes.fromhex(text)


def _host(params: Mapping[str, Any], name: str) -> str:
    text = _text(params, name, max_chars=253)
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if not _DNS_NAME.fullmatch(text):
            raise BadParamsError(f"kv_transfer_params.{name}: expected an address or a DNS name") from None
    return text
