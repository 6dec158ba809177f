"""The authority's state in its store: written before it is used, shared with whoever else writes."""

import asyncio
from datetime import timedelta

import pytest

from specserve_operator.identity.authority import AuthorityPolicy, AuthorityStateError, load_state
from specserve_operator.identity.keeper import AuthorityKeeper, CaStoreError, Stored
from tests.unit.identity.builders import Clock, FakeStore

HOUR = timedelta(hours=1)
POLICY = AuthorityPolicy(
    certificate_lifetime=2 * HOUR, ca_lifetime=24 * HOUR, rotate_after=8 * HOUR, propagation=3 * HOUR
)


def make_keeper(store: FakeStore, clock: Clock, changes: list[str] | None = None) -> AuthorityKeeper:
    def on_change() -> None:
        if changes is not None:
            changes.append(keeper.authority.trust_bundle)

    keeper = AuthorityKeeper(store, POLICY, now=clock.now, on_change=on_change)
    return keeper


async def test_the_first_start_makes_an_authority_and_a_second_one_finds_it() -> None:
    store, clock = FakeStore(), Clock()
    first, second = make_keeper(store, clock), make_keeper(store, clock)
    await first.start()
    await second.start()
    assert second.authority.trust_bundle == first.authority.trust_bundle
    assert store.saves == 1


async def test_an_empty_place_counts_as_none() -> None:
    store = FakeStore(data=b"")
    keeper = make_keeper(store, Clock())
    await keeper.start()
    assert keeper.authority.trust_bundle
    assert store.saves == 1


async def test_steps_in_which_nothing_is_due_write_nothing_and_tell_nobody() -> None:
    store, clock, changes = FakeStore(), Clock(), list[str]()
    keeper = make_keeper(store, clock, changes)
    await keeper.start()
    clock.go(hours=7)
    await keeper.step()
    assert (store.saves, len(changes)) == (1, 1)


async def test_every_change_of_the_bundle_is_told_with_the_new_one() -> None:
    store, clock, changes = FakeStore(), Clock(), list[str]()
    keeper = make_keeper(store, clock, changes)
    await keeper.start()
    for hours in (8, 3, 2):
        clock.go(hours=hours)
        await keeper.step()
    # One, then its successor too; that one signs, which changes no bundle; then it alone is left.
    assert [bundle.count("BEGIN CERTIFICATE") for bundle in changes] == [1, 2, 1]
    assert changes[-1] == keeper.authority.trust_bundle


async def test_the_authority_of_before_goes_on_while_the_store_is_down() -> None:
    store, clock = FakeStore(), Clock()
    keeper = make_keeper(store, clock)
    await keeper.start()
    before = keeper.authority
    store.is_down = True
    clock.go(hours=8)
    with pytest.raises(CaStoreError):
        await keeper.step()
    assert keeper.authority is before
    store.is_down = False
    await keeper.step()
    assert keeper.authority.trust_bundle.count("BEGIN CERTIFICATE") == 2


async def test_of_two_that_write_the_later_takes_what_the_earlier_wrote() -> None:
    store, clock = FakeStore(), Clock()
    first, second = make_keeper(store, clock), make_keeper(store, clock)
    await first.start()
    await second.start()
    clock.go(hours=8)
    await first.step()
    await second.step()
    assert second.authority.trust_bundle == first.authority.trust_bundle
    assert store.saves == 2


async def test_a_state_that_was_deleted_is_written_again() -> None:
    store, clock = FakeStore(), Clock()
    keeper = make_keeper(store, clock)
    await keeper.start()
    before = store.data
    store.put(None)
    await keeper.step()
    assert store.data == before
    store.put(None)
    clock.go(hours=8)
    await keeper.step()
    assert store.data is not None
    assert load_state(store.data).current.certificate_pem in keeper.authority.trust_bundle


async def test_a_state_that_somebody_else_has_stored_is_followed_though_nothing_is_due() -> None:
    store, other, clock, changes = FakeStore(), FakeStore(), Clock(), list[str]()
    keeper = make_keeper(store, clock, changes)
    await keeper.start()
    await make_keeper(other, clock).start()
    store.put(other.data)
    await keeper.step()
    assert other.data is not None
    assert keeper.authority.trust_bundle == load_state(other.data).current.certificate_pem
    assert (changes[-1], len(changes)) == (keeper.authority.trust_bundle, 2)
    assert store.saves == 1


async def test_a_stored_state_that_was_only_touched_changes_nothing() -> None:
    store, clock = FakeStore(), Clock()
    keeper = make_keeper(store, clock)
    await keeper.start()
    before = keeper.authority
    store.put(store.data)
    await keeper.step()
    assert keeper.authority is before


async def test_a_state_that_was_damaged_is_left_alone_and_the_one_of_before_goes_on() -> None:
    store, clock = FakeStore(), Clock()
    keeper = make_keeper(store, clock)
    await keeper.start()
    before = keeper.authority
    store.put(b"garbage")
    clock.go(hours=8)
    for _ in range(2):
        with pytest.raises(AuthorityStateError):
            await keeper.step()
    assert (store.data, keeper.authority) == (b"garbage", before)


async def test_a_damaged_state_stops_the_start_and_is_left_alone() -> None:
    store = FakeStore(data=b"garbage")
    with pytest.raises(AuthorityStateError):
        await make_keeper(store, Clock()).start()
    assert store.data == b"garbage"


async def test_a_restart_in_the_middle_of_a_rotation_waits_anew() -> None:
    store, clock = FakeStore(), Clock()
    keeper = make_keeper(store, clock)
    await keeper.start()
    clock.go(hours=8)
    await keeper.step()
    clock.go(hours=4)
    again = make_keeper(store, clock)
    await again.start()
    assert store.data is not None
    successor = load_state(store.data).successor
    assert successor is not None
    assert successor.signs_from == clock.now() + POLICY.propagation


async def test_it_runs_until_it_is_told_to_stop_whatever_the_store_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = FakeStore(), Clock()
    keeper = make_keeper(store, clock)
    await keeper.start()
    stop, loads = asyncio.Event(), 0
    monkeypatch.setattr("specserve_operator.identity.keeper.CHECK_SECONDS", 0.0)

    async def fail() -> Stored:
        nonlocal loads
        loads += 1
        if loads == 3:
            stop.set()
        raise CaStoreError("the store is down")

    monkeypatch.setattr(store, "load", fail)
    await asyncio.wait_for(keeper.run(stop), 5)
    assert caplog.text.count("the store is down; trying again") == 3


async def test_before_the_start_there_is_no_authority() -> None:
    with pytest.raises(RuntimeError, match="start"):
        _ = make_keeper(FakeStore(), Clock()).authority
