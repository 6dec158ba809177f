"""Rates of callers."""

from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.identity.limits import RateLimit


def test_a_burst_is_allowed_and_then_a_rate() -> None:
    limit = RateLimit(burst=3, per_second=0.5)
    assert [limit.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert limit.take("a", 1.9) is False
    assert limit.take("a", 2.0) is True
    assert limit.take("a", 2.0) is False


def test_callers_do_not_take_from_each_other() -> None:
    limit = RateLimit(burst=1, per_second=0)
    assert limit.take("a", 0.0)
    assert limit.take("b", 0.0)
    assert not limit.take("a", 0.0)


def test_no_more_than_so_many_callers_are_remembered() -> None:
    limit = RateLimit(burst=1, per_second=0, max_callers=10)
    for number in range(1000):
        limit.take(str(number), 0.0)
    assert len(limit._left) == 10
    assert not limit.take("999", 0.0)


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    limit = RateLimit(burst=1, per_second=1)
    assert limit.take("a", 100.0)
    assert not limit.take("a", 0.0)


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=60),
    st.integers(1, 5),
    st.sampled_from([0.1, 0.5, 1.0]),
)
def test_nobody_gets_more_than_burst_and_rate_together(gaps: list[float], burst: int, rate: float) -> None:
    limit, now, taken = RateLimit(burst, rate), 0.0, 0
    for gap in gaps:
        now += gap
        taken += limit.take("a", now)
    assert taken <= burst + rate * now + 1e-6
    assert taken >= min(len(gaps), burst)
