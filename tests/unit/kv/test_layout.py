"""A difference between two KV layouts is found, and the field is named."""

from dataclasses import fields, replace

import pytest

from specserve_workers.kv.layout import KvLayout, LayerLayout, first_difference

LAYOUT = KvLayout(
    revision="abc",
    dtype="bfloat16",
    block_size_tokens=32,
    instruction_set="amx/LBHNC",
    tensor_parallel_size=1,
    layers=(
        LayerLayout(name="model.layers.0", block_bytes=64, block_shape=(2, 16)),
        LayerLayout(name="model.layers.1", block_bytes=64, block_shape=(2, 16)),
    ),
)


def test_equal_layouts_have_no_difference() -> None:
    assert first_difference(LAYOUT, replace(LAYOUT)) is None


def test_layout_survives_the_wire() -> None:
    assert KvLayout.from_proto(LAYOUT.to_proto()) == LAYOUT


@pytest.mark.parametrize("name", [field.name for field in fields(KvLayout) if field.name != "layers"])
def test_every_field_is_compared_and_named(name: str) -> None:
    value = getattr(LAYOUT, name)
    other = replace(LAYOUT, **{name: value + 1 if isinstance(value, int) else value + "x"})
    difference = first_difference(LAYOUT, other)
    assert difference is not None
    assert difference.startswith(f"{name}: {value!r} on the producer")


@pytest.mark.parametrize(("name", "value"), [("name", "x"), ("block_bytes", 65), ("block_shape", (4, 8))])
def test_every_field_of_a_layer_is_compared_and_named(name: str, value: object) -> None:
    other = replace(LAYOUT, layers=(LAYOUT.layers[0], replace(LAYOUT.layers[1], **{name: value})))
    assert (first_difference(LAYOUT, other) or "").startswith(f"layers[1].{name}: ")


def test_missing_layer_is_named() -> None:
    assert first_difference(LAYOUT, replace(LAYOUT, layers=LAYOUT.layers[:1])) == (
        "layers: 2 on the producer, 1 on the consumer"
    )


def test_peer_values_are_named_but_not_in_full() -> None:
    hostile = "\N{SNOWMAN}\n" * 8192
    for other in (
        replace(LAYOUT, revision=hostile),
        replace(LAYOUT, layers=(replace(LAYOUT.layers[0], name=hostile), LAYOUT.layers[1])),
        replace(LAYOUT, layers=(replace(LAYOUT.layers[0], block_shape=(1,) * 8192), LAYOUT.layers[1])),
    ):
        difference = first_difference(LAYOUT, other) or ""
        assert len(difference) < 500
        assert difference.isascii()
        assert "... on the consumer" in difference


def test_block_bytes_are_those_of_all_layers() -> None:
    assert LAYOUT.block_bytes == 128
