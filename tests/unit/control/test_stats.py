from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_workers.control.stats import (
    LATENCY_BOUNDS_MS,
    FallbackCause,
    LatencyHistogram,
    RequestOutcome,
    ServingStats,
)
from specserve_workers.kv.errors import TransferCause


def test_every_cause_of_the_kv_connector_is_a_fallback_cause():
    assert {cause.value for cause in TransferCause} <= {cause.value for cause in FallbackCause}


def test_bounds_ascend_by_a_fifth_from_half_a_millisecond_to_over_two_minutes():
    ratios = [high / low for low, high in pairwise(LATENCY_BOUNDS_MS)]
    assert LATENCY_BOUNDS_MS[0] == 0.5
    assert LATENCY_BOUNDS_MS[-1] > 120_000
    assert all(ratio == pytest.approx(1.2, rel=1e-3) for ratio in ratios)


@pytest.mark.parametrize(("value", "bucket"), [(0.0, 0), (1.0, 0), (1.0001, 1), (10.0, 1), (10.5, 2)])
def test_a_value_counts_in_the_first_bucket_whose_bound_is_not_below_it(value: float, bucket: int):
    histogram = LatencyHistogram(bounds_ms=(1.0, 10.0))
    histogram.observe(value)
    assert histogram.counts == [int(i == bucket) for i in range(3)]
    assert histogram.sum_ms == value


@given(st.lists(st.floats(0, 1e6)), st.integers(1, 7))
def test_coarse_buckets_count_what_lies_below_their_bound(values: list[float], every: int):
    histogram = LatencyHistogram()
    for value in values:
        histogram.observe(value)
    assert histogram.total == len(values)
    for bound, count in histogram.cumulative(every=every):
        assert count == sum(value <= bound for value in values)


def test_running_is_what_began_and_has_no_outcome():
    stats = ServingStats()
    for _ in range(3):
        stats.begin()
    stats.end(RequestOutcome.CANCELLED)
    assert stats.running == 2
    assert stats.activity == 4


def test_a_sequence_of_one_token_has_no_time_per_output_token():
    stats = ServingStats()
    stats.observe_sequence(output_tokens=1, time_per_output_token_ms=0.0)
    assert stats.time_per_output_token.total == 0
    stats.observe_sequence(output_tokens=2, time_per_output_token_ms=7.0)
    assert (stats.time_per_output_token.total, stats.time_per_output_token.sum_ms) == (1, 7.0)
