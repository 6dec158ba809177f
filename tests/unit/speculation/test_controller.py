"""Plans of whole batches, with one block of 4 tokens per column."""

import numpy as np
import pytest

from specserve_workers.speculation.controller import Batch, SpeculationController
from specserve_workers.speculation.draft_kv import DraftKvLedger, Gap
from specserve_workers.speculation.policy import VerifiedStep
from specserve_workers.speculation.settings import PolicyName, SpeculationSettings

WHOLE = np.array([False, False])


class ByName:
    """Lengths given by the sequence's name."""

    name = PolicyName.STATIC
    needs_kld = False

    def __init__(self, **lengths: int) -> None:
        self._lengths = lengths
        self.forgotten: list[str] = []

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to learn."""

    def lengths(self, sequence_ids: list[str]) -> list[int]:
        return [self._lengths[i] for i in sequence_ids]

    def forget(self, sequence_id: str) -> None:
        self.forgotten.append(sequence_id)


def controller(**lengths: int) -> SpeculationController:
    made = SpeculationController(started_max_tokens=8)
    made.use_ledger(DraftKvLedger(32, 4))
    made.apply(SpeculationSettings(PolicyName.STATIC, static_tokens=8), 1)
    if lengths:
        made.policy = ByName(**lengths)
    return made


def batch(starts: tuple[int, int], ends: tuple[int, int]) -> Batch:
    tables = np.arange(1, 25, dtype=np.int32).reshape(2, 12)
    return Batch(("a", "b"), tables, list(starts), list(ends))


def test_the_longest_usable_length_decides_the_passes() -> None:
    made = controller(a=2, b=5)
    made.begin_step(batch((0, 0), (6, 6)))
    plan = made.plan(WHOLE)
    assert (plan.lengths, plan.passes, plan.gaps) == ((2, 5), 5, ())


def test_partial_prompts_are_fed_but_not_drafted_for() -> None:
    made = controller(a=2, b=5)
    made.begin_step(batch((0, 0), (6, 6)))
    plan = made.plan(np.array([True, True]))
    assert (plan.lengths, plan.passes, plan.feeds, plan.runs_draft) == ((0, 0), 0, True, True)
    made.drafted()
    made.begin_step(batch((6, 6), (7, 7)))
    assert made.plan(np.array([True, False])).passes == 5


def test_nothing_runs_when_nobody_wants_drafts() -> None:
    made = controller(a=0, b=0)
    made.begin_step(batch((0, 0), (6, 6)))
    assert not made.plan(np.array([True, False])).runs_draft


def test_off_plans_nothing_and_leaves_a_gap_that_is_filled_on_return() -> None:
    made = controller()
    made.apply(SpeculationSettings(PolicyName.OFF), 2)
    made.begin_step(batch((0, 0), (6, 3)))
    assert not made.plan(WHOLE).runs_draft
    made.apply(SpeculationSettings(PolicyName.STATIC, static_tokens=2), 3)
    made.begin_step(batch((6, 3), (7, 4)))
    assert made.plan(WHOLE).gaps == (Gap(0, 0, 6), Gap(1, 0, 3))
    made.drafted()
    made.begin_step(batch((7, 4), (8, 5)))
    assert made.plan(WHOLE).gaps == ()
    assert (made.counters.refilled_sequences, made.counters.refilled_tokens) == (2, 9)


def test_a_sequence_that_wants_no_drafts_keeps_its_gap() -> None:
    made = controller(a=0, b=3)
    made.apply(SpeculationSettings(PolicyName.OFF), 2)
    made.begin_step(batch((0, 0), (6, 6)))
    made.plan(WHOLE)
    made.policy = ByName(a=0, b=3)
    made.begin_step(batch((6, 6), (7, 7)))
    assert made.plan(WHOLE).gaps == (Gap(1, 0, 6),)
    made.drafted()
    made.policy = ByName(a=1, b=0)
    made.begin_step(batch((7, 7), (8, 8)))
    # Row a was fed together with b, but behind its hole.
    assert made.plan(WHOLE).gaps == (Gap(0, 0, 7),)


def test_a_step_in_which_the_drafter_was_not_asked_leaves_a_gap() -> None:
    made = controller()
    made.begin_step(batch((0, 0), (4, 4)))
    made.plan(WHOLE)
    made.drafted()
    made.begin_step(batch((4, 4), (6, 6)))  # no plan
    assert made.cut(["a", "b"], [[0] * 8, [0] * 8]) == [[], []]
    made.begin_step(batch((6, 6), (7, 7)))
    assert made.plan(WHOLE).gaps == (Gap(0, 4, 6), Gap(1, 4, 6))


def test_each_sequence_keeps_its_own_number_of_drafts() -> None:
    made = controller(a=1, b=3)
    made.begin_step(batch((0, 0), (6, 6)))
    made.plan(WHOLE)
    assert made.cut(["b", "a"], [[7, 8, 9], [4, 5, 6]]) == [[7, 8, 9], [4]]
    assert made.is_outstanding("a")
    made.end_sequences(finished=[], displaced=["a"])
    assert not made.is_outstanding("a")


def test_all_ranks_follow_the_first() -> None:
    other = np.array([[1, 4], [0, 2]])
    made = controller(a=7, b=7)
    shapes = []
    made.share = lambda mine: (shapes.append(mine.shape), other)[1]
    made.begin_step(batch((0, 3), (6, 6)))
    plan = made.plan(WHOLE)
    assert shapes == [(2, 2)]
    assert (plan.lengths, plan.passes, plan.gaps) == ((1, 4), 4, (Gap(1, 2, 3),))


def test_verified_drafts_count_for_the_policy_that_asked_for_them() -> None:
    made = controller()
    made.begin_step(batch((0, 0), (6, 6)))
    made.plan(WHOLE)
    made.cut(["a", "b"], [[1] * 8, [1] * 8])
    made.apply(SpeculationSettings(PolicyName.DSDE), 2)
    made.observe(VerifiedStep(["a", "b"], np.array([8, 8]), np.array([8, 2]), np.array([[0.5] * 8, [np.nan] * 8])))
    (static,) = made.stats()["by_policy"]
    assert static["policy"] == "Static"
    assert (static["verified_sequences"], static["drafted_tokens"], static["accepted_tokens"]) == (2, 16, 10)
    assert static["drafted_by_position"] == [2] * 8
    assert static["accepted_by_position"] == [2, 2, 1, 1, 1, 1, 1, 1]
    assert (static["kld_sum_nats"], static["kld_positions"]) == (4.0, 8)


def test_newer_settings_stay_in_force() -> None:
    made = controller()
    assert made.apply(SpeculationSettings(PolicyName.OFF), 5)
    assert not made.apply(SpeculationSettings(PolicyName.DSDE), 4)
    assert made.settings.policy is PolicyName.OFF
    assert made.apply(SpeculationSettings(PolicyName.DSDE), 5)
    assert made.generation == 5


def test_the_same_settings_do_not_make_the_policy_forget() -> None:
    made = controller()
    made.apply(SpeculationSettings(PolicyName.DSDE), 2)
    policy = made.policy
    made.apply(SpeculationSettings(PolicyName.DSDE), 3)
    assert made.policy is policy


def test_finished_sequences_are_forgotten_and_preempted_ones_remembered() -> None:
    made = controller(a=1, b=1)
    policy = made.policy
    made.end_sequences(finished=["a"], displaced=["b"])
    assert policy.forgotten == ["a"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("started", [0, 3])
def test_settings_in_force_are_what_the_engine_can_do(started: int) -> None:
    made = SpeculationController(started_max_tokens=started)
    made.apply(SpeculationSettings(PolicyName.STATIC, static_tokens=8), 1)
    stats = made.stats()
    assert stats["started_max_tokens"] == started
    assert stats["in_force"]["policy"] == ("Static" if started else "Off")
    assert stats["in_force"]["staticTokens"] == started
