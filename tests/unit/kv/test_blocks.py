"""Blocks come out as bytes and go in again, whatever the tensor's type, order of axes and strides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_workers.kv.blocks import BlockAxisError, KvBlocks

NUM_BLOCKS = 7
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def make_tensor(dtype: torch.dtype, *, kind: str = "plain") -> torch.Tensor:
    """[blocks, heads, tokens, width] of random bytes; `kind`: plain, K and V outside, or strided."""
    width = 8 // dtype.itemsize * 2
    shape = {"plain": (NUM_BLOCKS, 2, 4, width), "split": (2, NUM_BLOCKS, 4, width)}.get(kind)
    if shape is None:
        return make_tensor(dtype).transpose(1, 2)
    generator = torch.Generator().manual_seed(1)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 255, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def block(tensor: torch.Tensor, index: int, kind: str) -> torch.Tensor:
    return tensor[:, index] if kind == "split" else tensor[index]


@pytest.mark.parametrize("kind", ["plain", "split", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", [[2, 3, 4], [5, 0, 3], [6]], ids=str)
def test_gathered_blocks_scatter_to_equal_blocks(dtype: torch.dtype, kind: str, ids: list[int]) -> None:
    source = make_tensor(dtype, kind=kind)
    target = torch.zeros_like(source)
    data = KvBlocks({"layer": source}, num_blocks=NUM_BLOCKS).gather(0, ids)
    places = [(i + 1) % NUM_BLOCKS for i in ids]
    KvBlocks({"layer": target}, num_blocks=NUM_BLOCKS).scatter(0, places, data)
    for i, place in zip(ids, places, strict=True):
        expected = block(source, i, kind).contiguous().view(torch.uint8)
        assert torch.equal(block(target, place, kind).contiguous().view(torch.uint8), expected)
    for untouched in set(range(NUM_BLOCKS)) - set(places):
        assert not block(target, untouched, kind).contiguous().view(torch.uint8).any()


def test_gathered_bytes_are_those_of_the_blocks_in_the_order_asked() -> None:
    tensor = make_tensor(torch.float32)
    blocks = KvBlocks({"layer": tensor}, num_blocks=NUM_BLOCKS)
    expected = tensor[4].numpy().tobytes() + tensor[1].numpy().tobytes()
    assert blocks.gather(0, [4, 1]) == expected


def test_layers_may_differ_and_are_ordered_by_name() -> None:
    blocks = KvBlocks(
        {
            "b": torch.zeros(NUM_BLOCKS, 4, dtype=torch.float32),
            "a": torch.zeros(NUM_BLOCKS, 2, 3, dtype=torch.bfloat16),
        },
        num_blocks=NUM_BLOCKS,
    )
    assert [(layer.name, layer.block_bytes, layer.block_shape) for layer in blocks.layouts] == [
        ("a", 12, (2, 3)),
        ("b", 16, (4,)),
    ]
    assert len(blocks.gather(0, [0, 1])) == 24


def test_tensor_without_a_block_axis_is_refused_by_layer() -> None:
    with pytest.raises(BlockAxisError, match=r"layer x.*7 blocks"):
        KvBlocks({"x": torch.zeros(3, 4, NUM_BLOCKS)}, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("kind", ["plain", "strided"])
def test_bytes_of_the_wrong_length_are_refused_and_nothing_is_written(kind: str) -> None:
    tensor = torch.zeros_like(make_tensor(torch.float32, kind=kind))
    blocks = KvBlocks({"layer": tensor}, num_blocks=NUM_BLOCKS)
    with pytest.raises(ValueError, match="bytes"):
        blocks.scatter(0, [1, 2], b"\1" * (2 * blocks.layouts[0].block_bytes - 1))
    assert not tensor.any()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True))
def test_any_choice_of_blocks_round_trips(ids: list[int]) -> None:
    source = make_tensor(torch.bfloat16)
    target = torch.zeros_like(source)
    data = KvBlocks({"layer": source}, num_blocks=NUM_BLOCKS).gather(0, ids)
    KvBlocks({"layer": target}, num_blocks=NUM_BLOCKS).scatter(0, ids, data)
    assert torch.equal(target[ids].view(torch.uint8), source[ids].view(torch.uint8))
