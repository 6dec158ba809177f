"""DSDE against a direct reading of the paper's formulas, and what keeps it safe."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_workers.speculation.policy import DSDE, DsdeParameters, Off, Static, VerifiedStep, build_policy
from specserve_workers.speculation.settings import BatchCap, PolicyName, SpeculationSettings

EARLY = DsdeParameters(calibration_tokens=4)


def step(*rows: tuple[str, int, Sequence[float]]) -> VerifiedStep:
    """A step of (sequence, accepted tokens, KLD of each drafted token)."""
    width = max(len(kld) for _, _, kld in rows)
    padded = np.full((len(rows), width), np.nan)
    for row, (_, _, kld) in enumerate(rows):
        padded[row, : len(kld)] = kld
    return VerifiedStep(
        [name for name, _, _ in rows],
        np.array([len(kld) for _, _, kld in rows]),
        np.array([accepted for _, accepted, _ in rows]),
        padded,
    )


def dsde(cap: BatchCap = BatchCap.NONE, least: int = 0, most: int = 8, **parameters: float) -> DSDE:
    values = {"calibration_tokens": 4, **parameters}
    return DSDE(min_tokens=least, max_tokens=most, cap=cap, parameters=DsdeParameters(**values))  # type: ignore[arg-type]


def reference_length(
    steps: Sequence[tuple[int, Sequence[float]]], *, least: int, most: int, parameters: DsdeParameters
) -> float:
    """SL of eq. 8, written token by token."""

    def variance(values: list[float]) -> float:
        weights = [parameters.decay**age for age in range(len(values))]
        mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        return sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / sum(weights)

    history: list[float] = []
    proposed, most_accepted, calibration = 0, 0, []
    for accepted, kld in steps:
        if proposed < parameters.calibration_tokens:
            proposed += len(kld)
            most_accepted = max(most_accepted, accepted)
            calibration += kld
        history = [*kld[::-1], *history][: parameters.long_window_tokens]
    long = variance(history)
    short = variance(history[: parameters.short_window_tokens])
    ratio = 0.0 if len(history) < 2 else short / long if long >= parameters.variance_floor else 1.0
    last = steps[-1][1]
    penalty = (math.exp(parameters.scale * sum(last) / len(last)) - 1) * ratio
    top = max(calibration)
    longest = most_accepted * (1 + sum(calibration) / len(calibration) / (top + 1e-9))
    longest = min(max(longest, least, 1), most)
    return least if penalty > 1 else (1 - penalty) * (longest - least) + least


KLD = st.floats(0, 3).map(lambda value: round(value, 3))


@given(
    steps=st.lists(
        st.lists(KLD, min_size=1, max_size=8).flatmap(lambda kld: st.tuples(st.integers(0, len(kld)), st.just(kld))),
        min_size=1,
        max_size=12,
    ),
    least=st.integers(0, 3),
)
def test_the_predicted_length_is_that_of_the_formulas(steps: list[tuple[int, list[float]]], least: int) -> None:
    policy = dsde(least=least)
    for accepted, kld in steps:
        policy.observe(step(("a", accepted, kld)))
    if sum(len(kld) for _, kld in steps) < EARLY.calibration_tokens:
        return  # still calibrating: the length is not predicted yet
    expected = reference_length(steps, least=least, most=8, parameters=EARLY)
    low, high = math.ceil(expected - 1e-6), math.ceil(expected + 1e-6)
    assert low <= policy.lengths(["a"])[0] <= high


def test_a_sure_draft_gets_the_longest_length_and_a_wild_one_the_shortest() -> None:
    policy = dsde(least=2)
    policy.observe(step(("sure", 4, [0.0, 0.0, 0.0, 0.0]), ("wild", 0, [2.0, 0.1, 3.0, 0.2])))
    policy.observe(step(("sure", 4, [0.0] * 4), ("wild", 0, [3.0, 0.0, 4.0, 5.0])))
    assert policy.lengths(["sure", "wild"]) == [4, 2]


def test_the_first_lengths_double_after_full_acceptance() -> None:
    policy = dsde(calibration_tokens=100)
    assert policy.lengths(["a"]) == [4]
    policy.observe(step(("a", 3, [0.1] * 4)))
    assert policy.lengths(["a"]) == [4]
    policy.observe(step(("a", 4, [0.1] * 4)))
    assert policy.lengths(["a"]) == [8]
    policy.observe(step(("a", 8, [0.1] * 8)))
    assert policy.lengths(["a"]) == [8]


def test_the_mean_caps_long_sequences_and_leaves_short_ones() -> None:
    uncapped, capped = dsde(least=1), dsde(BatchCap.MEAN, least=1)
    seen = step(("long", 6, [0.0] * 6), ("short", 0, [3.0, 0.0, 3.0, 0.0]))
    for policy in (uncapped, capped):
        policy.observe(seen)
    assert uncapped.lengths(["long", "short"]) == [6, 1]
    assert capped.lengths(["long", "short"]) == [4, 1]  # ceil((6 + 1) / 2)
    assert capped.lengths(["long"]) == [6]


def test_calibrating_sequences_are_neither_capped_nor_in_the_mean() -> None:
    policy = dsde(BatchCap.MEAN, least=1)
    policy.observe(step(("settled", 0, [3.0, 0.0, 3.0, 0.0])))
    assert policy.lengths(["settled", "new"]) == [1, 4]


def test_a_sequence_at_zero_is_probed_now_and_then() -> None:
    policy = dsde(probe_interval_steps=5)
    policy.observe(step(("a", 0, [3.0, 0.0, 3.0, 0.0])))
    assert [policy.lengths(["a"])[0] for _ in range(11)] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_divergences_that_are_not_finite_do_not_spread(bad: float) -> None:
    policy = dsde(least=1)
    policy.observe(step(("a", 4, [0.0, bad, 0.0, 0.0, 0.0])))
    assert policy.lengths(["a"]) == [4]
    policy.observe(step(("a", 0, [bad, bad])))
    assert policy.lengths(["a"]) == [1]
    policy.observe(step(("a", 4, [0.0, 0.0])))
    assert policy.lengths(["a"]) == [4]


def test_one_value_is_no_variance() -> None:
    policy = dsde(calibration_tokens=1)
    policy.observe(step(("a", 1, [2.0])))
    assert policy.lengths(["a"]) == [2]  # 1 accepted * (1 + 2 / 2); the ratio counts as 0


def test_steady_divergence_counts_as_neutral() -> None:
    policy = dsde(least=0)
    policy.observe(step(("a", 4, [0.2, 0.2, 0.2, 0.2])))
    # ratio 1: (1 - (exp(0.4) - 1)) * 8 = 4.07
    assert policy.lengths(["a"]) == [5]


def test_a_reused_id_starts_anew() -> None:
    policy = dsde(least=1)
    policy.observe(step(("a", 0, [3.0, 0.0, 3.0, 0.0])))
    assert policy.lengths(["a"]) == [1]
    policy.forget("a")
    policy.forget("a")
    assert policy.lengths(["a"]) == [4]


def test_state_does_not_grow_with_the_number_of_sequences_seen() -> None:
    policy = dsde()
    for n in range(1000):
        policy.observe(step((f"s{n}", 1, [0.1, 0.2])))
        policy.forget(f"s{n}")
    assert len(policy._state) == 16
    assert not policy._rows


def test_rows_do_not_depend_on_their_neighbours() -> None:
    together, alone = dsde(), dsde()
    a = [(3, [0.1, 0.4, 0.2, 0.9]), (1, [0.3, 0.3]), (2, [0.05, 0.7, 0.1])]
    b = [(0, [2.0, 0.1]), (4, [0.0] * 8), (0, [1.0])]
    for (accepted_a, kld_a), (accepted_b, kld_b) in zip(a, b, strict=True):
        together.observe(step(("a", accepted_a, kld_a), ("b", accepted_b, kld_b)))
        alone.observe(step(("a", accepted_a, kld_a)))
    assert together.lengths(["a", "b"])[0] == alone.lengths(["a"])[0]


@given(
    data=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8),
        ),
        max_size=20,
    ),
    least=st.integers(0, 8),
    cap=st.sampled_from(list(BatchCap)),
)
def test_lengths_always_lie_within_the_bounds(data: list[tuple[str, list[float]]], least: int, cap: BatchCap) -> None:
    policy = DSDE(min_tokens=least, max_tokens=8, cap=cap)
    for name, kld in data:
        policy.observe(step((name, len(kld) // 2, kld)))
        assert all(min(least, 1) <= length <= 8 or length == 0 == least for length in policy.lengths(["a", "b", "c"]))
        assert all(length >= least for length in policy.lengths(["a", "b", "c"]))


def test_a_step_without_measured_divergence_changes_nothing() -> None:
    policy = dsde()
    policy.observe(VerifiedStep(["a"], np.array([4]), np.array([4]), None))
    assert policy.lengths(["a"]) == [4]


def test_nothing_is_drafted_where_no_draft_is_allowed() -> None:
    policy = DSDE(min_tokens=0, max_tokens=0, cap=BatchCap.MEAN)
    assert [policy.lengths(["a"]) for _ in range(40)] == [[0]] * 40


def test_static_and_off() -> None:
    assert Static(3).lengths(["a", "b"]) == [3, 3]
    assert Off().lengths(["a", "b"]) == [0, 0]


def test_settings_choose_the_policy() -> None:
    static = build_policy(SpeculationSettings(PolicyName.STATIC, static_tokens=5))
    assert static.lengths(["a"]) == [5]
    assert build_policy(SpeculationSettings(PolicyName.DSDE, max_tokens=2)).lengths(["a"]) == [2]
    assert build_policy(SpeculationSettings()).name is PolicyName.OFF
