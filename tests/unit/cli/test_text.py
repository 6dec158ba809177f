"""Ages, tables and pairs as kubectl prints them."""

from datetime import UTC, datetime

import pytest

from specserve_operator.cli.text import (
    format_age,
    format_bytes,
    format_duration,
    indent,
    pairs,
    ruled_table,
    table,
)

MINUTE, HOUR, DAY, YEAR = 60, 3600, 86_400, 365 * 86_400


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5, "<invalid>"),
        (-0.5, "0s"),
        (0, "0s"),
        (5.9, "5s"),
        (119, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (10 * MINUTE + 20, "10m"),
        (179 * MINUTE, "179m"),
        (3 * HOUR, "3h"),
        (3 * HOUR + 20 * MINUTE, "3h20m"),
        (9 * HOUR + 59 * MINUTE, "9h"),
        (47 * HOUR, "47h"),
        (2 * DAY, "2d"),
        (3 * DAY + 4 * HOUR, "3d4h"),
        (9 * DAY + 4 * HOUR, "9d"),
        (2 * YEAR + 3 * DAY, "2y3d"),
        (9 * YEAR + 3 * DAY, "9y"),
    ],
)
def test_durations_read_like_kubectls(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_age_counts_from_a_kubernetes_time() -> None:
    now = datetime(2026, 1, 1, 12, 3, 20, tzinfo=UTC)
    assert format_age("2026-01-01T12:00:00Z", now) == "3m20s"


@pytest.mark.parametrize("text", [None, "", "yesterday"])
def test_age_of_an_unknown_time_is_unknown(text: str | None) -> None:
    assert format_age(text, datetime(2026, 1, 1, tzinfo=UTC)) == "<unknown>"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (5 * 2**40, "5.0 TiB")],
)
def test_bytes_have_binary_units(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


def test_table_columns_line_up_and_lines_have_no_trailing_space() -> None:
    assert table(["NAME", "AGE"], [["a", "5s"], ["longer", ""]]) == ["NAME     AGE", "a        5s", "longer"]


def test_ruled_table_underlines_its_header() -> None:
    assert ruled_table(["Type", "Age"], [["Ready", "5s"]]) == ["Type    Age", "----    ---", "Ready   5s"]


def test_pairs_align_and_continue_below_themselves() -> None:
    assert pairs([("Name", "tiny"), ("Namespace", "a\nb")]) == [
        "Name:       tiny",
        "Namespace:  a",
        "            b",
    ]


def test_indent_leaves_empty_lines_empty() -> None:
    assert indent(["a", "", "b"]) == ["  a", "", "  b"]
