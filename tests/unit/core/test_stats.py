"""Statistics of pods add up, in any order, and percentiles lie where the samples are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.core.stats import (
    Histogram,
    HistogramMismatchError,
    KvTransferStats,
    PodStats,
    PolicyStats,
    RequestStats,
    SpeculationSettings,
    SpeculationStats,
    merge_pool_stats,
)

BOUNDS = (1.0, 2.0, 5.0, 10.0)
counts = st.lists(st.integers(0, 1000), min_size=5, max_size=5).map(tuple)
histograms = st.one_of(st.just(Histogram()), counts.map(lambda c: Histogram(BOUNDS, c, float(sum(c)))))
policy_stats = st.builds(
    PolicyStats,
    verified_sequences=st.integers(0, 100),
    drafted_tokens=st.integers(0, 100),
    accepted_tokens=st.integers(0, 100),
    drafted_by_position=st.lists(st.integers(0, 9), max_size=4).map(tuple),
)


def pod(name: str = "a", **parts: object) -> PodStats:
    return PodStats(pod_name=name, pod_uid=name, pool="decode", revision="r", **parts)  # type: ignore[arg-type]


@given(histograms, histograms)
def test_merging_histograms_is_commutative_and_keeps_every_sample(a: Histogram, b: Histogram) -> None:
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).samples == a.samples + b.samples
    assert a.merge(b).sum_ms == a.sum_ms + b.sum_ms


@given(histograms, histograms, histograms)
def test_merging_histograms_is_associative(a: Histogram, b: Histogram, c: Histogram) -> None:
    assert a.merge(b).merge(c).counts == a.merge(b.merge(c)).counts


@given(counts, st.floats(1, 99), st.floats(1, 99))
def test_percentiles_rise_with_the_percentage_and_stay_within_the_bounds(
    samples: tuple[int, ...], low: float, high: float
) -> None:
    histogram = Histogram(BOUNDS, samples)
    if not sum(samples):
        assert histogram.percentile(low) is None
        return
    values = [histogram.percentile(p) for p in sorted((low, high))]
    assert values[0] is not None
    assert values[1] is not None
    assert 0 <= values[0] <= values[1] <= BOUNDS[-1]


@given(counts, counts, st.floats(1, 99))
def test_a_merged_percentile_lies_between_those_of_its_parts(
    a: tuple[int, ...], b: tuple[int, ...], percent: float
) -> None:
    left, right = Histogram(BOUNDS, a), Histogram(BOUNDS, b)
    parts = [v for v in (left.percentile(percent), right.percentile(percent)) if v is not None]
    merged = left.merge(right).percentile(percent)
    if merged is not None:
        assert min(parts) - 1e-9 <= merged <= max(parts) + 1e-9


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [
        ((10, 0, 0, 0, 0), 50, 0.5),  # half-way through the first bucket
        ((0, 10, 0, 0, 0), 90, 1.9),
        ((5, 5, 0, 0, 0), 50, 1.0),
        ((0, 0, 4, 0, 0), 25, 2.75),  # a quarter of the way from 2 to 5
        ((0, 0, 0, 0, 3), 50, 10.0),  # above all bounds: the last one
        ((0, 0, 0, 0, 0), 50, None),
    ],
)
def test_percentile_interpolates_within_its_bucket(
    samples: tuple[int, ...], percent: float, expected: float | None
) -> None:
    assert Histogram(BOUNDS, samples).percentile(percent) == pytest.approx(expected)


def test_histograms_of_other_bounds_are_not_added() -> None:
    with pytest.raises(HistogramMismatchError):
        Histogram((1.0,), (1, 0)).merge(Histogram((2.0,), (1, 0)))


def test_a_histogram_with_a_missing_count_is_refused() -> None:
    with pytest.raises(ValueError, match="one count more"):
        Histogram((1.0, 2.0), (1, 0))


@given(policy_stats, policy_stats)
def test_merging_policy_statistics_is_commutative(a: PolicyStats, b: PolicyStats) -> None:
    assert a.merge(b) == b.merge(a)
    assert len(a.merge(b).drafted_by_position) == max(len(a.drafted_by_position), len(b.drafted_by_position))


def test_acceptance_and_mean_accepted_length() -> None:
    stats = PolicyStats(verified_sequences=100, drafted_tokens=400, accepted_tokens=170)
    assert stats.acceptance_ratio == pytest.approx(0.425)
    assert stats.mean_accepted_length == pytest.approx(2.7)  # 1.7 draft tokens and the target's own
    assert PolicyStats(verified_sequences=5, drafted_tokens=5).mean_accepted_length == 1.0
    assert PolicyStats().acceptance_ratio is None
    assert PolicyStats().mean_accepted_length is None


def test_pods_of_a_pool_add_up() -> None:
    a = pod(
        "a",
        requests=RequestStats(started=3, running=1, time_to_first_token=Histogram((5.0,), (3, 0), 9.0)),
        speculation=SpeculationStats(
            in_force=SpeculationSettings(policy="DSDE"),
            generation=4,
            started_max_tokens=8,
            by_policy=(("DSDE", PolicyStats(1, 4, 2)),),
        ),
        kv_transfer=KvTransferStats(remote_prefills=2, fallbacks=(("connect", 1),)),
    )
    b = pod(
        "b",
        requests=RequestStats(started=1, running=2),
        speculation=SpeculationStats(
            in_force=SpeculationSettings(policy="DSDE"),
            generation=3,
            started_max_tokens=4,
            by_policy=(("DSDE", PolicyStats(1, 2, 1)), ("Static", PolicyStats(1, 3, 3))),
        ),
        kv_transfer=KvTransferStats(remote_prefills=5, fallbacks=(("connect", 2), ("stalled", 1))),
    )
    merged = merge_pool_stats([a, b])
    assert merged.pods == 2
    assert (merged.requests.started, merged.requests.running) == (4, 3)
    assert merged.requests.time_to_first_token.samples == 3
    assert dict(merged.speculation.by_policy)["DSDE"] == PolicyStats(2, 6, 3)
    assert merged.speculation.total.drafted_tokens == 9
    # What all of them can do, and the generation that has reached all of them.
    assert (merged.speculation.started_max_tokens, merged.speculation.generation) == (4, 3)
    assert merged.speculation.in_force == SpeculationSettings(policy="DSDE")
    assert merged.kv_transfer.remote_prefills == 7
    assert merged.kv_transfer.fallbacks == (("connect", 3), ("stalled", 1))
    assert merged.kv_transfer.fallback_count == 4


def test_settings_on_which_pods_differ_are_not_reported_as_common() -> None:
    a = pod("a", speculation=SpeculationStats(in_force=SpeculationSettings(policy="DSDE")))
    b = pod("b", speculation=SpeculationStats(in_force=SpeculationSettings(policy="Off")))
    assert merge_pool_stats([a, b]).speculation.in_force is None


def test_no_pods_are_no_traffic() -> None:
    merged = merge_pool_stats([])
    assert (merged.pods, merged.requests.started, merged.speculation.total.acceptance_ratio) == (0, 0, None)


def test_causes_of_fallbacks_are_put_into_words() -> None:
    stats = KvTransferStats(fallbacks=(("stalled", 1), ("no_peers", 0), ("connect", 2)))
    assert stats.fallback_causes == "connect 2, stalled 1"
    assert KvTransferStats().fallback_causes == "cause unknown"
