"""Leases end exactly once, at the time they should, and never under a read."""

import threading
from contextlib import AbstractContextManager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_workers.kv.errors import UnknownLeaseError
from specserve_workers.kv.lease import MAX_EARLY_RELEASES, Lease, LeaseBudget, LeaseTable, Pull, new_token

LEASE_SECONDS = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_lease(request_id: str = "r", *, pulls: int = 1) -> Lease:
    return Lease(
        token=new_token(),
        request_id=request_id,
        block_ids=(3, 4),
        prompt_tokens=40,
        prompt_sha256=b"\0" * 32,
        pulls=pulls,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable(lease_seconds=LEASE_SECONDS, clock=clock)


def test_lease_ends_after_its_last_pull(table: LeaseTable) -> None:
    lease = make_lease(pulls=2)
    table.grant(lease)
    first, second = table.take(lease.token), table.take(lease.token)
    first.end()
    assert table.pop_ended() == set()
    second.end()
    assert table.pop_ended() == {"r"}
    assert table.pop_ended() == set()
    assert table.open_count == 0


def test_ending_a_pull_twice_counts_once(table: LeaseTable) -> None:
    lease = make_lease(pulls=2)
    table.grant(lease)
    first = table.take(lease.token)
    table.take(lease.token)
    first.end()
    first.end()
    assert table.pop_ended() == set()


def test_spent_unknown_and_expired_tokens_get_the_same_answer(table: LeaseTable, clock: Clock) -> None:
    spent, expired = make_lease("spent"), make_lease("expired")
    table.grant(spent)
    table.take(spent.token)
    table.grant(expired)
    clock.now = LEASE_SECONDS
    table.expire()
    texts = set()
    for token in (spent.token, expired.token, new_token(), b""):
        with pytest.raises(UnknownLeaseError) as caught:
            table.take(token)
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_untouched_lease_expires_at_its_time_and_not_before(table: LeaseTable, clock: Clock) -> None:
    table.grant(make_lease())
    clock.now = LEASE_SECONDS - 0.001
    table.expire()
    assert (table.pop_ended(), table.expired_count) == (set(), 0)
    clock.now = LEASE_SECONDS
    table.expire()
    assert (table.pop_ended(), table.expired_count) == ({"r"}, 1)


def test_reading_renews_a_lease(table: LeaseTable, clock: Clock) -> None:
    lease = make_lease()
    table.grant(lease)
    pull = table.take(lease.token)
    for _ in range(5):
        clock.now += LEASE_SECONDS - 1
        table.expire()
        with pull.reading():
            pass
    assert table.pop_ended() == set()


def test_hung_pull_loses_its_lease_and_may_not_read_on(table: LeaseTable, clock: Clock) -> None:
    lease = make_lease()
    table.grant(lease)
    pull = table.take(lease.token)
    clock.now = LEASE_SECONDS
    table.expire()
    assert table.pop_ended() == {"r"}
    with pytest.raises(UnknownLeaseError), pull.reading():
        pass
    pull.end()
    assert table.pop_ended() == set()


def test_lease_released_under_a_read_ends_when_the_read_is_over(table: LeaseTable) -> None:
    lease = make_lease()
    table.grant(lease)
    pull = table.take(lease.token)
    with pull.reading():
        assert table.release(lease.token)
        assert table.pop_ended() == set()
    assert table.pop_ended() == {"r"}


def test_release_of_some_pulls_keeps_the_rest(table: LeaseTable) -> None:
    lease = make_lease(pulls=3)
    table.grant(lease)
    assert table.release(lease.token, pulls=2)
    table.take(lease.token).end()
    assert table.pop_ended() == {"r"}
    assert not table.release(lease.token)


def test_release_before_the_grant_ends_the_lease_as_it_is_granted(table: LeaseTable) -> None:
    lease = make_lease(pulls=3)
    assert not table.release(lease.token)
    table.grant(lease)
    assert (table.pop_ended(), table.open_count) == ({"r"}, 0)
    with pytest.raises(UnknownLeaseError):
        table.take(lease.token)


def test_pulls_released_before_the_grant_are_not_there_after_it(table: LeaseTable) -> None:
    lease = make_lease(pulls=3)
    table.release(lease.token, pulls=1)
    table.release(lease.token, pulls=1)
    table.grant(lease)
    table.take(lease.token).end()
    assert table.pop_ended() == {"r"}


def test_whole_release_before_the_grant_outweighs_parts(table: LeaseTable) -> None:
    for calls in ((0, 1), (1, 0)):
        lease = make_lease(pulls=3)
        for pulls in calls:
            table.release(lease.token, pulls=pulls)
        table.grant(lease)
        assert table.open_count == 0


def test_early_release_is_forgotten_after_the_lease_time(table: LeaseTable, clock: Clock) -> None:
    lease = make_lease()
    table.release(lease.token)
    clock.now = LEASE_SECONDS
    table.grant(lease)
    assert (table.pop_ended(), table.open_count) == (set(), 1)


def test_early_releases_are_bounded_and_the_oldest_goes_first(table: LeaseTable) -> None:
    oldest, newest = make_lease("oldest"), make_lease("newest")
    table.release(oldest.token)
    for _ in range(MAX_EARLY_RELEASES - 1):
        table.release(new_token())
    table.release(newest.token)
    table.release(b"no token")
    table.grant(oldest)
    table.grant(newest)
    assert table.pop_ended() == {"newest"}


def test_take_waits_for_a_grant_by_another_thread(table: LeaseTable) -> None:
    lease = make_lease()
    thread = threading.Timer(0.05, table.grant, [lease])
    thread.start()
    assert table.take(lease.token, wait_seconds=30).lease is lease
    thread.join()


def test_closed_table_lets_everything_go(table: LeaseTable) -> None:
    early, late = make_lease("early"), make_lease("late")
    table.grant(early)
    table.close()
    table.grant(late)
    assert table.pop_ended() == {"early", "late"}
    with pytest.raises(UnknownLeaseError):
        table.take(late.token, wait_seconds=30)


def test_token_in_use_is_refused(table: LeaseTable) -> None:
    lease = make_lease()
    table.grant(lease)
    with pytest.raises(ValueError, match="in use"):
        table.grant(lease)


def test_end_is_announced(clock: Clock) -> None:
    woken: list[bool] = []
    table = LeaseTable(lease_seconds=LEASE_SECONDS, clock=clock, on_end=lambda: woken.append(True))
    lease = make_lease()
    table.grant(lease)
    assert woken == []
    table.release(lease.token)
    assert woken == [True]


class Scenario:
    """Does random things to a table and checks after each that nothing ended under a read."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.table = LeaseTable(lease_seconds=LEASE_SECONDS, clock=self.clock)
        self.leases: list[Lease] = []
        self.pulls: list[Pull] = []
        self.reads: list[tuple[AbstractContextManager[None], str]] = []
        self.ended: list[str] = []
        self.late: list[Lease] = []
        self.released: dict[bytes, tuple[int, float]] = {}  # by token: pulls, when
        self.is_closed = False

    def run(self, action: str, which: int, amount: int) -> None:
        with suppress(UnknownLeaseError, IndexError):
            getattr(self, action)(which, amount)
        assert not {request_id for _, request_id in self.reads} & set(self.ended), "ended under a read"

    def grant(self, which: int, amount: int) -> None:
        self.leases.append(make_lease(f"r{len(self.leases)}", pulls=amount + 1))
        self.table.grant(self.leases[-1])

    def release_early(self, which: int, amount: int) -> None:
        """Release `which` pulls (0: all) of a lease that is granted by `grant_late`."""
        lease = make_lease(f"late{len(self.leases) + len(self.late)}", pulls=amount + 1)
        self.table.release(lease.token, pulls=which)
        self.released[lease.token] = (which or lease.pulls, self.clock.now)
        self.late.append(lease)

    def grant_late(self, which: int, amount: int) -> None:
        """Without a lost release: what was given up is not there, and nothing more is given up."""
        lease = self.late.pop(which)
        released, age = self.released[lease.token]
        left = lease.pulls if self.clock.now - age >= LEASE_SECONDS else lease.pulls - released
        self.leases.append(lease)
        open_before = self.table.open_count
        self.table.grant(lease)
        is_open = self.table.open_count > open_before
        assert is_open == (left > 0 and not self.is_closed)

    def take(self, which: int, amount: int) -> None:
        self.pulls.append(self.table.take(self.leases[which].token))

    def end_pull(self, which: int, amount: int) -> None:
        self.pulls[which].end()

    def release(self, which: int, amount: int) -> None:
        self.table.release(self.leases[which].token, pulls=amount)

    def pass_time(self, which: int, amount: int) -> None:
        self.clock.now += amount * 4
        self.table.expire()

    def begin_read(self, which: int, amount: int) -> None:
        pull = self.pulls[which]
        reading = pull.reading()
        reading.__enter__()
        self.reads.append((reading, pull.lease.request_id))

    def end_read(self, which: int, amount: int) -> None:
        self.reads.pop(which)[0].__exit__(None, None, None)

    def collect(self, which: int, amount: int) -> None:
        self.ended += self.table.pop_ended()

    def close(self, which: int, amount: int) -> None:
        if amount == which == 0:  # rarely, or nothing else would happen
            self.table.close()
            self.is_closed = True

    def settle(self) -> None:
        """End all reads and let the lease time pass."""
        while self.reads:
            self.end_read(0, 0)
        self.clock.now += LEASE_SECONDS
        self.table.expire()
        self.collect(0, 0)


ACTIONS = [
    "grant",
    "release_early",
    "grant_late",
    "take",
    "end_pull",
    "release",
    "pass_time",
    "begin_read",
    "end_read",
    "collect",
    "close",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.integers(0, 3)), max_size=80))
def test_no_sequence_of_events_leaks_a_lease_or_ends_one_twice(events: list[tuple[str, int, int]]) -> None:
    scenario = Scenario()
    for action, which, amount in events:
        scenario.run(action, which, amount)
    scenario.settle()
    assert sorted(scenario.ended) == sorted(lease.request_id for lease in scenario.leases)
    assert scenario.table.open_count == 0


def test_many_threads_pull_each_allowed_pull_once(table: LeaseTable) -> None:
    lease = make_lease(pulls=20)
    table.grant(lease)
    taken: list[bool] = []

    def work() -> None:
        for _ in range(10):
            try:
                pull = table.take(lease.token)
            except UnknownLeaseError:
                continue
            with pull.reading():
                taken.append(True)
            pull.end()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 20
    assert table.pop_ended() == {"r"}


def test_budget_refuses_beyond_blocks_or_leases_and_takes_back() -> None:
    budget = LeaseBudget(max_leases=2, max_blocks=10)
    assert budget.try_hold("a", 6)
    assert not budget.try_hold("b", 5)
    assert budget.try_hold("b", 4)
    assert not budget.try_hold("c", 0)
    budget.free("a")
    budget.free("a")
    assert budget.held_blocks == 4
    assert not budget.try_hold("b", 1)
    assert budget.try_hold("c", 6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 6)), max_size=60))
def test_budget_is_never_exceeded_and_always_adds_up(events: list[tuple[bool, int, int]]) -> None:
    budget = LeaseBudget(max_leases=3, max_blocks=10)
    held: dict[str, int] = {}
    for is_hold, which, num_blocks in events:
        request_id = f"r{which}"
        if is_hold and budget.try_hold(request_id, num_blocks):
            held[request_id] = num_blocks
        elif not is_hold:
            budget.free(request_id)
            held.pop(request_id, None)
        assert budget.held_blocks == sum(held.values()) <= 10
        assert len(held) <= 3
