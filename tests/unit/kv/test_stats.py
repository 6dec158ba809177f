"""Numbers of several ranks become those of the pod."""

import pytest

from specserve_workers.kv.errors import TransferCause
from specserve_workers.kv.stats import RequestCounters, TransferCounters, merge_rank_stats


def test_requests_are_those_of_one_rank_and_bytes_those_of_all() -> None:
    counters = RequestCounters()
    counters.count_loaded(70)
    counters.count_fallback(TransferCause.STALLED)
    rank = {**counters.to_dict(), "loaded_bytes": 10, "served_bytes": 3, "served_transfers": 2, "open_leases": 1}
    assert merge_rank_stats([rank, {**rank, "loaded_bytes": 30}]) == {
        "remote_prefills": 1,
        "loaded_tokens": 70,
        "fallbacks": {"stalled": 1},
        "refused_leases": 0,
        "loaded_bytes": 40,
        "served_bytes": 6,
        "served_transfers": 2,
        "open_leases": 1,
        "expired_leases": 0,
        "bad_tokens": 0,
    }


def test_without_ranks_all_is_zero() -> None:
    merged = merge_rank_stats([])
    assert merged.pop("fallbacks") == {}
    assert set(merged.values()) == {0}


def test_counters_start_at_zero_and_refuse_other_names() -> None:
    counters = TransferCounters()
    assert set(counters.to_dict().values()) == {0}
    counters.add("served_bytes", 7)
    assert counters.to_dict()["served_bytes"] == 7
    with pytest.raises(KeyError):
        counters.add("served")
