import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_workers.frontend.peers import PeerRotation, PrefillTimeModel


def test_peers_are_tried_in_turn():
    rotation = PeerRotation()
    assert [rotation.choose(["a", "b", "c"], now=0)[0] for _ in range(4)] == ["a", "b", "c", "a"]


def test_the_second_try_goes_to_another_peer():
    assert PeerRotation().choose(["a", "b", "c"], now=0) == ["a", "b"]
    assert PeerRotation().choose(["a"], now=0) == ["a"]
    assert PeerRotation().choose([], now=0) == []


def test_a_failed_peer_is_left_out_for_two_seconds():
    rotation = PeerRotation()
    rotation.exclude("a", now=10.0)
    assert rotation.choose(["a", "b"], now=11.9) == ["b"]
    assert sorted(rotation.choose(["a", "b"], now=12.1)) == ["a", "b"]
    rotation.exclude("a", now=13.0)
    rotation.exclude("b", now=13.0)
    assert rotation.choose(["a", "b"], now=13.5) == []


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.sets(st.sampled_from("abcdef")), st.integers(0, 20))
def test_at_most_two_different_usable_peers_are_chosen(peers: list[str], failed: set[str], turns: int):
    rotation = PeerRotation()
    for peer in failed:
        rotation.exclude(peer, now=0.0)
    for _ in range(turns):
        rotation.choose(peers, now=1.0)
    chosen = rotation.choose(peers, now=1.0)
    usable = set(peers) - failed
    assert set(chosen) <= usable
    assert len(chosen) == len(set(chosen)) == min(2, len(usable))


def test_the_first_call_has_a_minute():
    assert PrefillTimeModel().deadline_seconds(10**6) == 60.0


def test_short_prompts_have_five_seconds_and_long_ones_three_times_the_prediction():
    times = PrefillTimeModel()
    times.observe(100_000, 10.0)
    assert times.deadline_seconds(100) == 5.0
    assert times.deadline_seconds(100_000) == pytest.approx(30.0)
    assert times.deadline_seconds(200_000) == pytest.approx(60.0)


def test_a_deadline_that_nobody_meets_grows():
    times = PrefillTimeModel()
    times.observe(100_000, 2.0)
    before = times.deadline_seconds(100_000)
    for _ in range(4):
        times.observe(100_000, times.deadline_seconds(100_000))
    assert times.deadline_seconds(100_000) > 3 * before


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1000)), min_size=1), st.integers(0, 10**6))
def test_deadlines_never_fall_below_the_floor(calls: list[tuple[int, float]], num_bytes: int):
    times = PrefillTimeModel()
    for size, seconds in calls:
        times.observe(size, seconds)
    assert times.deadline_seconds(num_bytes) >= 5.0
