"""The KV cache of a fake engine: blocks of a few bytes that follow from the prompt up to their end.

`KvBlocks` takes the place of the workers' class of that name, which needs tensors. What a block holds depends on all
tokens up to its end, as in a real cache, so a decode pod can tell whether what it has loaded belongs to its prompt.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Final

from specserve_workers.kv.layout import LayerLayout

LAYERS: Final = ("model.layers.0.attn", "model.layers.1.attn")


@dataclass(frozen=True, slots=True)
class Layer:
    """Stands for a layer's tensor. Blocks that were never written are zeros."""

    block_bytes: int
    dtype: str = "torch.bfloat16"
    content: dict[int, bytes] = field(default_factory=dict)


class KvBlocks:
    """The blocks of all layers, ordered by name.

    Written by the threads that pull and read by those that serve, always whole.
    """

    def __init__(self, tensors: Mapping[str, Layer], *, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._layers = tuple(tensors[name] for name in sorted(tensors))
        self.layouts = tuple(
            LayerLayout(name=name, block_bytes=tensors[name].block_bytes, block_shape=(tensors[name].block_bytes,))
            for name in sorted(tensors)
        )

    def gather(self, layer_index: int, block_ids: Sequence[int]) -> bytes:
        """The bytes of these blocks of one layer, in the order given."""
        layer = self._layers[layer_index]
        empty = bytes(layer.block_bytes)
        return b"".join(layer.content.get(block_id, empty) for block_id in block_ids)

    def scatter(self, layer_index: int, block_ids: Sequence[int], data: bytes) -> None:
        """Writes these blocks of one layer. Raises ValueError unless `data` is just that long."""
        layer = self._layers[layer_index]
        size = layer.block_bytes
        if len(data) != len(block_ids) * size:
            raise ValueError(f"{len(data)} bytes for {len(block_ids)} blocks of {size} bytes")
        for position, block_id in enumerate(block_ids):
            layer.content[block_id] = data[position * size : (position + 1) * size]


def prompt_blocks(token_ids: Sequence[int], *, block_size_tokens: int) -> list[bytes]:
    """A digest for each block of a prompt, the last one possibly of fewer tokens."""
    digests, digest = [], b""
    for start in range(0, len(token_ids), block_size_tokens):
        tokens = array("i", token_ids[start : start + block_size_tokens]).tobytes()
        digest = hashlib.sha256(digest + tokens).digest()
        digests.append(digest)
    return digests


def layer_content(digests: Iterable[bytes], *, layer_index: int, block_bytes: int) -> bytes:
    """What these blocks of a prompt hold in one layer."""
    return b"".join(_stretched(digest + bytes([layer_index]), block_bytes) for digest in digests)


def _stretched(seed: bytes, size: int) -> bytes:
    digest = hashlib.sha256(seed).digest()
    return b"".join(islice(repeat(digest), -(-size // len(digest))))[:size]
