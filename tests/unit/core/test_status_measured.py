"""What the status says of measurements: KV transfer, speculation and latencies, and the conditions they decide."""

from collections.abc import Sequence
from typing import Any

import pytest

from specserve_operator.api.status import KvTransferStatus
from specserve_operator.core.measurements import round_significant, stored_kv_transfer
from specserve_operator.core.objects import Manifest
from specserve_operator.core.stats import PodStats
from tests.unit.core.builders import (
    decode_stats_of,
    disaggregated,
    pods_of,
    ready_children,
    set_ready,
    totals_of,
)
from tests.unit.core.statuses import Status, condition, status_of, verdict


def decode_stats(children: Sequence[Manifest], **stats: Any) -> list[PodStats]:
    return [decode_stats_of(pods_of(children, "decode")[0], **stats)]


def test_kv_transfer_is_ready_once_tokens_were_loaded() -> None:
    children = ready_children(disaggregated())
    idle = status_of({}, children, stats=decode_stats(children))
    assert verdict(idle, "KVTransferReady") == ("Unknown", "NoTraffic")
    moved = status_of({}, children, previous=idle, stats=decode_stats(children, transfers=2))
    assert verdict(moved, "KVTransferReady") == ("True", "Transferring")
    assert moved["kvTransfer"] == {"transfers": 2, "fallbacks": 0, "bytes": 2000, "tokens": 200}


def test_kv_transfer_fails_when_there_are_only_fallbacks_and_recovers_with_the_next_transfer() -> None:
    children = ready_children(disaggregated())
    good = status_of({}, children, stats=decode_stats(children, transfers=2))
    bad = status_of({}, children, previous=good, stats=decode_stats(children, transfers=2, fallbacks={"connect": 3}))
    assert verdict(bad, "KVTransferReady") == ("False", "TransferFailing")
    assert condition(bad, "KVTransferReady")["message"] == "decode pods prefill for themselves (connect 3)"
    assert bad["columns"]["kvFallbacks"] == "3"
    # Without traffic the last word stands.
    same = status_of({}, children, previous=bad, stats=decode_stats(children, transfers=2, fallbacks={"connect": 3}))
    assert verdict(same, "KVTransferReady") == ("False", "TransferFailing")
    back = status_of({}, children, previous=same, stats=decode_stats(children, transfers=4, fallbacks={"connect": 3}))
    assert verdict(back, "KVTransferReady") == ("True", "Transferring")


def test_kv_transfer_names_the_missing_prefill_pods() -> None:
    children = ready_children(disaggregated())
    good = status_of({}, children, stats=decode_stats(children, transfers=2))
    set_ready(pods_of(children, "prefill")[0], False)
    assert verdict(status_of({}, children, previous=good), "KVTransferReady") == ("False", "NoPrefillPeers")


def test_fallbacks_for_want_of_prefill_pods_are_no_failure_once_those_are_back() -> None:
    children = ready_children(disaggregated())
    idle = status_of({}, children, stats=decode_stats(children))
    prefill = pods_of(children, "prefill")[0]
    set_ready(prefill, False)
    fallen_back = decode_stats(children, fallbacks={"no_peers": 5})
    away = status_of({}, children, previous=idle, stats=fallen_back)
    assert verdict(away, "KVTransferReady") == ("Unknown", "NoPrefillPeers")
    set_ready(prefill, True)
    back = status_of({}, children, previous=away, stats=fallen_back)
    assert verdict(back, "KVTransferReady") == ("Unknown", "NoTraffic")
    more = status_of({}, children, previous=back, stats=decode_stats(children, fallbacks={"no_peers": 5, "connect": 1}))
    assert verdict(more, "KVTransferReady") == ("False", "TransferFailing")


def test_totals_without_earlier_ones_to_compare_are_no_failure() -> None:
    children = ready_children(disaggregated())
    aggregated = status_of({"prefill": None}, children)
    assert "kvTransfer" not in aggregated
    first = status_of({}, children, previous=aggregated, stats=decode_stats(children, fallbacks={"connect": 3}))
    assert first["kvTransfer"]["fallbacks"] == 3
    assert verdict(first, "KVTransferReady") == ("Unknown", "NoTraffic")


def test_silent_pods_leave_the_totals_and_make_the_conditions_unknown() -> None:
    children = ready_children(disaggregated())
    stats = decode_stats(children, transfers=2, drafted=500, accepted=300, verified=100)
    good = status_of({}, children, stats=stats)
    silent = status_of({}, children, previous=good, kv_transfer=totals_of(stats))
    assert verdict(silent, "KVTransferReady") == ("Unknown", "MetricsStale")
    assert verdict(silent, "SpeculationEffective") == ("Unknown", "MetricsStale")
    assert silent["kvTransfer"] == good["kvTransfer"]


@pytest.mark.parametrize(
    ("drafted", "accepted", "expected"),
    [
        (0, 0, ("Unknown", "NoTraffic")),
        (100, 60, ("Unknown", "TooFewSamples")),
        (1000, 100, ("False", "LowAcceptance")),
        (1000, 620, ("True", "DraftsAccepted")),
    ],
)
def test_speculation_is_judged_by_its_acceptance(drafted: int, accepted: int, expected: tuple[str, str]) -> None:
    children = ready_children(disaggregated())
    stats = decode_stats(children, drafted=drafted, accepted=accepted, verified=drafted // 4)
    assert verdict(status_of({}, children, stats=stats), "SpeculationEffective") == expected


def test_the_speculation_status_has_the_pods_numbers() -> None:
    children = ready_children(disaggregated())
    stats = [decode_stats_of(p, drafted=400, accepted=248, verified=100) for p in pods_of(children, "decode")]
    status = status_of({}, children, stats=stats)
    assert status["speculation"] == {
        "state": "On",
        "reason": "DraftsAccepted",
        "policy": "DSDE",
        "acceptancePercent": 62,
        "meanAcceptedLength": "3.5",
        "draft": "file:///models/draft",
    }
    cells = status["columns"]
    assert (cells["acceptance"], cells["speculation"], cells["draft"]) == ("62%", "On", "draft")


def test_speculation_is_off_while_the_pods_say_so() -> None:
    children = ready_children(disaggregated())
    status = status_of({}, children, stats=decode_stats(children, policy="Off"))
    assert status["speculation"]["state"] == "Off"


OBJECTIVES = {
    "timeToFirstToken": [{"percentile": 90, "milliseconds": 50, "millisecondsPerThousandInputTokens": 100}],
    "timePerOutputToken": [{"percentile": 50, "milliseconds": 15}],
}


@pytest.mark.parametrize(
    ("ttft", "tpot", "expected"),
    [
        ((0, 0, 0, 0, 0), (0, 0, 0, 0, 0), ("Unknown", "NoTraffic")),
        ((5, 0, 0, 0, 0), (5, 0, 0, 0, 0), ("Unknown", "TooFewSamples")),
        ((100, 0, 0, 0, 0), (0, 100, 0, 0, 0), ("True", "ObjectivesMet")),
        ((100, 0, 0, 0, 0), (0, 0, 100, 0, 0), ("False", "ObjectiveMissed")),
    ],
)
def test_objectives_are_judged_by_their_percentiles(
    ttft: tuple[int, ...], tpot: tuple[int, ...], expected: tuple[str, str]
) -> None:
    children = ready_children(disaggregated())
    stats = decode_stats(children, ttft_counts=ttft, tpot_counts=tpot)
    assert verdict(status_of({"objectives": OBJECTIVES}, children, stats=stats), "ObjectivesMet") == expected


def test_latency_is_shown_against_its_objective() -> None:
    children = ready_children(disaggregated())
    stats = decode_stats(children, ttft_counts=(100, 0, 0, 0, 0), tpot_counts=(0, 100, 0, 0, 0))
    status = status_of({"objectives": OBJECTIVES}, children, stats=stats)
    (ttft,) = status["latency"]["timeToFirstToken"]
    assert ttft == {
        "percentile": 90,
        "observedMilliseconds": 9,
        "objectiveMilliseconds": 60,  # 50 ms and 100 ms for each 1000 tokens of prompts of 100
        "samples": 100,
        "windowSeconds": 300,
    }
    assert (status["columns"]["ttft"], status["columns"]["tpot"]) == ("9ms/60ms", "15ms/15ms")


def test_latency_without_objectives_is_shown_alone() -> None:
    children = ready_children(disaggregated())
    status = status_of({}, children, stats=decode_stats(children, ttft_counts=(0, 0, 10, 0, 0)))
    assert status["latency"]["timeToFirstToken"][0]["percentile"] == 90
    assert status["columns"]["ttft"] == "38ms"
    assert verdict(status, "ObjectivesMet") == ("True", "NotConfigured")


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.2, 1), (7.6, 8), (38.4, 38), (99.7, 100), (523.0, 520), (1499.0, 1500)]
)
def test_milliseconds_are_rounded_to_two_digits(value: float, rounded: int) -> None:
    assert round_significant(value) == rounded


@pytest.mark.parametrize("stored", [None, {}, {"kvTransfer": {"transfers": "7", "fallbacks": -1, "bytes": None}}])
def test_totals_that_are_no_numbers_count_as_none(stored: Status | None) -> None:
    assert stored_kv_transfer(stored or {}) == KvTransferStatus()
