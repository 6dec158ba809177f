"""A record says again what was put into it, and what cannot be understood is as good as none."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.core.names import Pool
from specserve_operator.core.objects import Manifest
from specserve_operator.core.records import PoolPin, parse_record, record_data

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
pins = st.builds(
    PoolPin,
    inputs=words,
    target_inputs=words,
    revision=words,
    target_revision=words,
    image=words,
    max_draft_tokens=st.none() | st.integers(0, 64),
    identity_server=st.none() | words,
    template=st.fixed_dictionaries({"metadata": st.dictionaries(words, words), "spec": st.dictionaries(words, words)}),
)
PIN = PoolPin("1", "2", "r", "t", "engine:1", 8, None, {"metadata": {}, "spec": {"containers": []}})


def stored(data: Any, number: Any = 3) -> Manifest:
    metadata = {"name": "coder-x", "namespace": "llm"}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": metadata,
        "revision": number,
        "data": data,
    }


@given(st.dictionaries(st.sampled_from(Pool), pins, max_size=3), words, st.integers(1, 10**6))
def test_a_record_says_what_was_put_into_it(given_pins: dict[Pool, PoolPin], upgrade: str, number: int) -> None:
    data = record_data(given_pins, upgrade)
    found = parse_record(stored(copy.deepcopy(data), number))
    assert found is not None
    assert (found.pins, found.upgrade, found.number) == (given_pins, upgrade, number)
    assert found.data == data == record_data(found.pins, found.upgrade)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: None,
        lambda data: "text",
        lambda data: {**data, "version": 2},
        lambda data: {k: v for k, v in data.items() if k != "upgrade"},
        lambda data: {**data, "pools": ["decode"]},
        lambda data: {**data, "pools": {"training": data["pools"]["decode"]}},
        lambda data: {**data, "pools": {"decode": {}}},
        lambda data: {**data, "pools": {"decode": {**data["pools"]["decode"], "template": {"spec": None}}}},
        lambda data: {**data, "pools": {"decode": {**data["pools"]["decode"], "maxDraftTokens": "many"}}},
    ],
)
def test_a_record_that_was_edited_or_is_of_another_version_is_no_record(damage: Any) -> None:
    data = record_data({Pool.DECODE: PIN}, "")
    assert parse_record(stored(data)) is not None
    assert parse_record(stored(damage(data))) is None


def test_a_record_without_a_number_is_no_record() -> None:
    obj = stored(record_data({Pool.DECODE: PIN}, ""))
    del obj["revision"]
    assert parse_record(obj) is None
