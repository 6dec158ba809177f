"""How much there is to read in a body."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_workers.frontend.body_shape import Separators, has_more_checks

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def count_values(value: Any, *, containers_only: bool = False) -> int:
    """Values, names of fields included; or lists and objects alone."""
    if isinstance(value, dict):
        names = 0 if containers_only else len(value)
        return 1 + names + sum(count_values(v, containers_only=containers_only) for v in value.values())
    if isinstance(value, list):
        return 1 + sum(count_values(v, containers_only=containers_only) for v in value)
    return 0 if containers_only else 1


def separators(*parts: bytes) -> Separators:
    found = Separators()
    for part in parts:
        found.add(part)
    return found


@given(json_values, st.sampled_from(["utf-8", "utf-16", "utf-16-be", "utf-32-le"]))
def test_there_are_never_more_values_than_separators_say(value: Any, encoding: str) -> None:
    text = json.dumps(value, ensure_ascii=False).encode(encoding, "surrogatepass")
    # A list that is not empty has a bracket, and a value before its first comma.
    assert count_values(value) <= 1 + 2 * separators(text).count
    assert count_values(value, containers_only=True) <= separators(text).opening


def count_checks(value: Any) -> int:
    """Lists, objects and items of lists, and what objects hold but strings, `value` included if it is one of these."""
    if isinstance(value, dict):
        return 1 + sum(max(count_checks(v), not isinstance(v, str)) for v in value.values())
    if isinstance(value, list):
        return 1 + sum(max(count_checks(v), 1) for v in value)
    return 0


@given(json_values)
def test_what_the_engine_may_complain_of_is_counted_exactly(value: Any) -> None:
    there_are = max(count_checks(value), len(value) if isinstance(value, dict) else 0)
    body = {"x": value}  # no field that may hold token ids
    assert not has_more_checks(body, 1 + max(there_are, 100))
    counted = count_checks(body)
    assert counted <= 1 + separators(json.dumps(body).encode()).count
    assert has_more_checks(body, counted - 1)


TEN = list(range(10))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": TEN},
        {"prompt": [TEN, TEN, []]},
        {"tokens": TEN},
        {"token_ids": TEN, "allowed_token_ids": TEN},
        {"messages": [{f"k{i}": "text" for i in range(6)}, {f"k{i}": "text" for i in range(6)}]},
    ],
)
def test_token_ids_and_texts_are_not_counted(body: Any) -> None:
    assert not has_more_checks(body, 6)


@pytest.mark.parametrize("wrong", [None, -1, 1 << 32, 1 << 99, 1.0, "x", [], {}])
@pytest.mark.parametrize("nest", [lambda ids: {"prompt": ids}, lambda ids: {"prompt": [TEN, ids]}])
def test_one_wrong_item_makes_the_whole_list_count(nest: Any, wrong: Any) -> None:
    assert has_more_checks(nest([*TEN, wrong]), 10)


@pytest.mark.parametrize(
    "body",
    [
        TEN,
        [TEN],
        {"messages": TEN},
        {"bad_words": TEN},
        {"stop_token_ids": ["x"] * 10},
        {"x": {"prompt": TEN}},
        {"prompt": [[TEN]]},
        {"prompt": ["x"] * 10},
        {"prompt": [[None] * 3] * 3},
        {"logit_bias": dict.fromkeys("abcdefghij", "x")},
        {"documents": [{"a": 1, "b": 2, "c": 3}] * 3},
    ],
)
def test_what_may_be_wrong_each_for_itself_counts(body: Any) -> None:
    assert has_more_checks(body, 9)


def test_parts_add_up() -> None:
    found = separators(b'{"a":[1,', b'2],"b":"x:y"}')
    assert (found.opening, found.others, found.count) == (2, 5, 7)
