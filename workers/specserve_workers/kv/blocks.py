"""Whole KV blocks as opaque bytes: out of a layer's tensor and into one.

The inside of a block is the backend's business (the CPU backend packs it by instruction set), so nothing here
looks into one. A block of one layer is `block_bytes` bytes; layers may differ.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from specserve_workers.kv.layout import LayerLayout


class BlockAxisError(ValueError):
    """A layer's tensor has no axis of `num_blocks` where one is expected."""


class _LayerBlocks(Protocol):
    """Reads and writes whole blocks of one layer; `block_ids` are valid indices, without repetition."""

    def gather(self, block_ids: Sequence[int]) -> bytes: ...

    def scatter(self, block_ids: Sequence[int], data: bytes) -> None: ...


class KvBlocks:
    """The blocks of all layers of one KV cache, layers ordered by name.

    Args:
        tensors: layer name -> tensor with an axis of `num_blocks`: the first one, or the second after K and V.
        num_blocks: blocks in the cache.

    Raises `BlockAxisError` naming the layer whose tensor fits neither.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._layers: list[_LayerBlocks] = []
        layouts: list[LayerLayout] = []
        for name in sorted(tensors):
            tensor = _block_major(name, tensors[name], num_blocks=num_blocks)
            block_shape = tuple(tensor.shape[1:])
            block_bytes = tensor[0].numel() * tensor.element_size()
            layouts.append(LayerLayout(name=name, block_bytes=block_bytes, block_shape=block_shape))
            is_plain_memory = tensor.device.type == "cpu" and tensor.is_contiguous()
            self._layers.append(_HostLayer(tensor) if is_plain_memory else _TensorLayer(tensor))
        self.layouts = tuple(layouts)

    def gather(self, layer_index: int, block_ids: Sequence[int]) -> bytes:
        """Return the bytes of these blocks of one layer, in the order given."""
        return self._layers[layer_index].gather(block_ids)

    def scatter(self, layer_index: int, block_ids: Sequence[int], data: bytes) -> None:
        """Write the bytes of these blocks of one layer. Raises ValueError unless `data` is just that long."""
        expected_bytes = len(block_ids) * self.layouts[layer_index].block_bytes
        if len(data) != expected_bytes:
            raise ValueError(f"{len(data)} bytes for {len(block_ids)} blocks of {expected_bytes} bytes in all")
        self._layers[layer_index].scatter(block_ids, data)


def _block_major(name: str, tensor: torch.Tensor, *, num_blocks: int) -> torch.Tensor:
    """Return a view whose first axis counts blocks."""
    for axis in range(min(2, tensor.dim())):
        if tensor.shape[axis] == num_blocks:
            return tensor.movedim(axis, 0)
    raise BlockAxisError(f"layer {name}: no axis of {num_blocks} blocks in shape {tuple(tensor.shape)}")


class _HostLayer:
    """Contiguous memory of this process, seen as a matrix [num_blocks, block_bytes]."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # A view of the same memory, also for element types that NumPy does not know (bfloat16).
        self._bytes = tensor.view(tensor.shape[0], -1).view(torch.uint8).numpy()

    def gather(self, block_ids: Sequence[int]) -> bytes:
        data: bytes = self._bytes[_as_index(block_ids)].tobytes()
        return data

    def scatter(self, block_ids: Sequence[int], data: bytes) -> None:
        self._bytes[_as_index(block_ids)] = np.frombuffer(data, np.uint8).reshape(len(block_ids), -1)


class _TensorLayer:
    """Any other tensor: strided, or on a device. Copies are complete when a call returns."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def gather(self, block_ids: Sequence[int]) -> bytes:
        index = torch.tensor(list(block_ids), device=self._tensor.device)
        host = self._tensor.index_select(0, index).reshape(-1).view(torch.uint8).cpu()
        data: bytes = host.numpy().tobytes()
        return data

    def scatter(self, block_ids: Sequence[int], data: bytes) -> None:
        index = torch.tensor(list(block_ids), device=self._tensor.device)
        # torch wants memory that may be written to, so the message's bytes are copied once.
        host = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self._tensor.dtype)
        source = host.view(len(block_ids), *self._tensor.shape[1:]).to(self._tensor.device)
        self._tensor.index_copy_(0, index, source)
        if self._tensor.device.type == "cuda":
            torch.cuda.current_stream(self._tensor.device).synchronize()


def _as_index(block_ids: Sequence[int]) -> slice | np.ndarray:
    """A slice where the ids are consecutive, which saves a copy; otherwise an index array."""
    first, count = block_ids[0], len(block_ids)
    if block_ids[-1] - first == count - 1 and all(block_ids[i] == first + i for i in range(count)):
        return slice(first, first + count)
    return np.asarray(block_ids, dtype=np.int64)
