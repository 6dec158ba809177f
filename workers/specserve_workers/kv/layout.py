"""What must be equal on two pods for the bytes of a KV block to mean the same thing on both."""

from dataclasses import dataclass, fields
from typing import Final, Self

from specserve_protos.v1alpha1 import kv_transfer_pb2 as pb

PROTOCOL_VERSION: Final = 1
_MAX_SHOWN_CHARS: Final = 300  # more than any real value has; the sentence goes into a header of 8 KB


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """One layer: its name, the bytes of one block (K and V together), and the block's shape as declared."""

    name: str
    block_bytes: int
    block_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The layout of one worker's KV cache, draft layers left out.

    Attributes:
        revision: target revision, a hash over all that decides the cache's content.
        dtype: torch name without the prefix, e.g. "bfloat16".
        block_size_tokens: tokens in a block.
        instruction_set: how the backend packs a block.
        tensor_parallel_size: shards of the model.
        layers: ordered by name.
        protocol_version: of the wire protocol.
    """

    revision: str
    dtype: str
    block_size_tokens: int
    instruction_set: str
    tensor_parallel_size: int
    layers: tuple[LayerLayout, ...]
    protocol_version: int = PROTOCOL_VERSION

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers together."""
        return sum(layer.block_bytes for layer in self.layers)

    def to_proto(self) -> pb.KvLayout:
        """Return the wire form."""
        return pb.KvLayout(
            protocol_version=self.protocol_version,
            revision=self.revision,
            dtype=self.dtype,
            block_size_tokens=self.block_size_tokens,
            instruction_set=self.instruction_set,
            tensor_parallel_size=self.tensor_parallel_size,
            layers=[
                pb.LayerLayout(name=layer.name, block_bytes=layer.block_bytes, block_shape=layer.block_shape)
                for layer in self.layers
            ],
        )

    @classmethod
    def from_proto(cls, message: pb.KvLayout) -> Self:
        """Read the wire form. Any message is a layout: whether it is ours, `first_difference` says."""
        return cls(
            protocol_version=message.protocol_version,
            revision=message.revision,
            dtype=message.dtype,
            block_size_tokens=message.block_size_tokens,
            instruction_set=message.instruction_set,
            tensor_parallel_size=message.tensor_parallel_size,
            layers=tuple(
                LayerLayout(name=layer.name, block_bytes=layer.block_bytes, block_shape=tuple(layer.block_shape))
                for layer in message.layers
            ),
        )


def first_difference(producer: KvLayout, consumer: KvLayout) -> str | None:
    """Return a sentence naming the first field that differs, or None where the layouts are equal.

    The consumer's value may be anything: it is shown in ASCII and not in full where it is long.
    """
    names = ["protocol_version", *(f.name for f in fields(KvLayout) if f.name not in ("protocol_version", "layers"))]
    for name in names:
        ours, theirs = getattr(producer, name), getattr(consumer, name)
        if ours != theirs:
            return f"{name}: {ours!r} on the producer, {_shown(theirs)} on the consumer"
    if len(producer.layers) != len(consumer.layers):
        return f"layers: {len(producer.layers)} on the producer, {len(consumer.layers)} on the consumer"
    for index, (layer, other) in enumerate(zip(producer.layers, consumer.layers, strict=True)):
        for field in fields(LayerLayout):
            ours, theirs = getattr(layer, field.name), getattr(other, field.name)
            if ours != theirs:
                return f"layers[{index}].{field.name}: {ours!r} on the producer, {_shown(theirs)} on the consumer"
    return None


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
