"""Counters that do not fall over restarts, and latencies of the last minutes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.core.stats import (
    Histogram,
    KvTransferStats,
    PodStats,
    PolicyStats,
    RequestStats,
    SpeculationSettings,
    SpeculationStats,
)
from specserve_operator.runtime.history import PodHistory, subtract

BOUNDS = (10.0, 100.0)


def histogram(*counts: int) -> Histogram:
    return Histogram(BOUNDS, counts, float(sum(counts)))


def answer(*, uptime: float, started: int = 0, ttft: Histogram | None = None, **changes: object) -> PodStats:
    requests = RequestStats(started=started, time_to_first_token=ttft or histogram(0, 0, 0))
    return replace(PodStats("pod", "uid", "decode", "rev", uptime_seconds=uptime, requests=requests), **changes)


def make_history() -> PodHistory:
    return PodHistory(window_seconds=300.0)


def test_totals_go_on_after_the_process_was_restarted() -> None:
    history = make_history()
    history.add(answer(uptime=50, started=7), 50.0)
    assert history.add(answer(uptime=2, started=1), 60.0).requests.started == 8
    assert history.add(answer(uptime=4, started=3), 62.0).requests.started == 10
    assert history.add(answer(uptime=1, started=0), 70.0).requests.started == 10


def test_a_restart_shows_by_the_counter_where_the_clock_does_not_tell() -> None:
    history = make_history()
    history.add(answer(uptime=5, started=7), 5.0)
    # Long unseen: the new process is older than the last answer was, but has counted less.
    assert history.add(answer(uptime=60, started=2), 100.0).requests.started == 9


def test_what_describes_the_present_is_of_the_process_that_runs() -> None:
    history = make_history()
    old = SpeculationStats(
        in_force=SpeculationSettings("DSDE"),
        generation=3,
        started_max_tokens=8,
        by_policy=(("DSDE", PolicyStats(drafted_tokens=10, accepted_tokens=5)),),
    )
    new = SpeculationStats(in_force=SpeculationSettings("Off"), generation=1, started_max_tokens=4)
    history.add(answer(uptime=9, speculation=old, kv_transfer=KvTransferStats(served_bytes=5, open_leases=2)), 9.0)
    total = history.add(answer(uptime=1, speculation=new, kv_transfer=KvTransferStats(open_leases=1)), 10.0)
    assert total.speculation.in_force == SpeculationSettings("Off")
    assert (total.speculation.generation, total.speculation.started_max_tokens) == (1, 4)
    assert total.speculation.total.accepted_tokens == 5
    assert total.kv_transfer.served_bytes == 5
    assert total.kv_transfer.open_leases == 1


def test_latencies_are_those_of_the_window() -> None:
    history = make_history()
    assert history.add(answer(uptime=1, ttft=histogram(1, 0, 0)), 0.0).requests.time_to_first_token.samples == 1
    history.add(answer(uptime=200, started=1, ttft=histogram(1, 4, 0)), 200.0)
    late = history.add(answer(uptime=400, started=2, ttft=histogram(1, 4, 2)), 400.0)
    # The first request, at 0 s, is more than 300 s old by now.
    assert late.requests.time_to_first_token.counts == (0, 4, 2)
    idle = history.add(answer(uptime=1000, started=2, ttft=histogram(1, 4, 2)), 1000.0)
    assert idle.requests.time_to_first_token.samples == 0


def test_what_an_old_pod_counted_before_it_was_first_seen_is_not_recent() -> None:
    history = make_history()
    first = history.add(answer(uptime=10_000, ttft=histogram(50, 0, 0)), 0.0)
    assert first.requests.time_to_first_token.samples == 0
    second = history.add(answer(uptime=10_010, started=1, ttft=histogram(50, 1, 0)), 10.0)
    assert second.requests.time_to_first_token.counts == (0, 1, 0)


def test_a_restart_within_the_window_keeps_the_latencies_before_it() -> None:
    history = make_history()
    history.add(answer(uptime=10, started=3, ttft=histogram(3, 0, 0)), 10.0)
    after = history.add(answer(uptime=1, started=1, ttft=histogram(0, 1, 0)), 20.0)
    assert after.requests.time_to_first_token.counts == (3, 1, 0)


def test_a_new_version_with_other_buckets_starts_its_latencies_anew() -> None:
    history = make_history()
    history.add(answer(uptime=10, started=3, ttft=histogram(3, 0, 0)), 10.0)
    other = Histogram((1.0,), (2, 0), 1.0)
    after = history.add(answer(uptime=1, started=2, ttft=other), 20.0)
    assert after.requests.time_to_first_token == other
    assert after.requests.started == 5


def test_subtract_never_goes_below_zero() -> None:
    assert subtract(histogram(1, 0, 0), histogram(2, 0, 0)).counts == (0, 0, 0)


lives = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=5)


@given(lives=lives)
def test_totals_never_fall_and_end_at_the_sum_of_all_lives(lives: list[list[int]]) -> None:
    """Each life is the requests between two answers of one process, which counts from zero."""
    history, now, totals = make_history(), 0.0, [0]
    for life in lives:
        started = 0
        for step, requests in enumerate(life):
            started, now = started + requests, now + 10.0
            totals.append(history.add(answer(uptime=1.0 + 10 * step, started=started), now).requests.started)
            # A process that lives for a single answer has the same uptime as the next one's first.
        now += 10.0
    assert totals == sorted(totals)
    distinguishable = all(len(life) > 1 for life in lives[:-1])
    if distinguishable:
        assert totals[-1] == sum(sum(life) for life in lives)
