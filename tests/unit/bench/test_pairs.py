"""Ratios of interleaved rounds, their intervals and what they say of a bar."""

import numpy as np
import pytest

from bench.pairs import Claim, paired_ratio


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    theirs = [100.0, 50.0, 200.0, 80.0, 10.0]  # a machine whose speed drifts
    ours = [90.0, 45.0, 180.0, 72.0, 90.0]  # and one round that was disturbed
    claim = paired_ratio("F", ours, theirs)
    assert (claim.value, claim.low, claim.rounds) == (0.9, 0.9, 5)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(100):
        theirs = random.normal(100, 10, 24)
        ours = theirs * random.normal(0.97, 0.02, 24)
        claim = paired_ratio("F", ours.tolist(), theirs.tolist(), seed=trial)
        covered += claim.low <= 0.97 <= claim.high
    assert 88 <= covered <= 100


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.98, 0.99, "held"), (0.9, 0.979, "missed"), (0.97, 0.99, "undecided")],
)
def test_a_bar_is_held_only_by_the_whole_interval(low: float, high: float, verdict: str) -> None:
    assert Claim("F", (low + high) / 2, low, high, rounds=24).verdict(0.98) == verdict


def test_rounds_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="F: 2 rounds against 1"):
        paired_ratio("F", [1.0, 2.0], [1.0])
