"""Marks of valid draft KV, against a model that remembers what every slot really holds."""

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_workers.speculation.draft_kv import DraftKvLedger, DraftKvTracker, Gap, split_gaps

BLOCK_SIZE = 4
NUM_BLOCKS = 12
SIMULATED_BLOCKS = 7


def table(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


def positions(*values: int) -> list[int]:
    return list(values)


def test_a_sequence_fed_from_the_start_has_no_gap() -> None:
    tracker = DraftKvTracker(DraftKvLedger(NUM_BLOCKS, BLOCK_SIZE))
    blocks = table([3, 5, 7])
    tracker.begin_step(["a"], blocks, starts=positions(0), ends=positions(6))
    tracker.fed(["a"], blocks, starts=positions(0), ends=positions(6))
    assert tracker.begin_step(["a"], blocks, starts=positions(6), ends=positions(7)) == [6]


def test_positions_computed_without_the_draft_are_the_gap() -> None:
    tracker = DraftKvTracker(DraftKvLedger(NUM_BLOCKS, BLOCK_SIZE))
    blocks = table([3, 5, 7])
    tracker.begin_step(["a"], blocks, starts=positions(0), ends=positions(3))
    tracker.fed(["a"], blocks, starts=positions(0), ends=positions(3))
    tracker.begin_step(["a"], blocks, starts=positions(3), ends=positions(6))
    assert tracker.begin_step(["a"], blocks, starts=positions(6), ends=positions(7)) == [3]


def test_a_new_sequence_inherits_the_marks_of_cached_blocks() -> None:
    ledger = DraftKvLedger(NUM_BLOCKS, BLOCK_SIZE)
    tracker = DraftKvTracker(ledger)
    tracker.begin_step(["a"], table([1, 2]), starts=positions(0), ends=positions(4))
    tracker.fed(["a"], table([1, 2]), starts=positions(0), ends=positions(4))
    tracker.begin_step(["a"], table([1, 2]), starts=positions(4), ends=positions(8))
    # Block 1 was fed to the draft, block 2 was not.
    valid = tracker.begin_step(["b"], table([1, 2, 3]), starts=positions(8), ends=positions(10))
    assert valid == [4]


def test_foreign_blocks_hold_nothing_valid() -> None:
    ledger = DraftKvLedger(NUM_BLOCKS, BLOCK_SIZE)
    ledger.mark(np.array([1, 2]), valid=True)
    ledger.mark_foreign([2])
    assert ledger.leading_valid(np.array([1, 2]), 8) == 4
    ledger.mark_foreign([])
    assert ledger.leading_valid(np.array([1, 2]), 8) == 4


def test_a_preempted_sequence_is_looked_up_again_in_its_new_blocks() -> None:
    tracker = DraftKvTracker(DraftKvLedger(NUM_BLOCKS, BLOCK_SIZE))
    tracker.begin_step(["a"], table([1, 2]), starts=positions(0), ends=positions(8))
    tracker.fed(["a"], table([1, 2]), starts=positions(0), ends=positions(8))
    tracker.forget(["a"])
    assert tracker.begin_step(["a"], table([5, 6]), starts=positions(4), ends=positions(8)) == [0]


def test_rows_are_independent() -> None:
    tracker = DraftKvTracker(DraftKvLedger(NUM_BLOCKS, BLOCK_SIZE))
    blocks = table([1, 2, 0], [3, 4, 5])
    starts, ends = positions(0, 0), positions(5, 9)
    tracker.begin_step(["a", "b"], blocks, starts=starts, ends=ends)
    tracker.fed(["b"], blocks[1:], starts=starts[1:], ends=ends[1:])
    assert tracker.begin_step(["a", "b"], blocks, starts=ends, ends=positions(6, 10)) == [0, 9]


def test_a_block_that_another_row_fills_in_the_same_step_is_not_taken_for_valid() -> None:
    ledger = DraftKvLedger(NUM_BLOCKS, BLOCK_SIZE)
    ledger.mark(np.array([1]), valid=True)  # of an earlier owner
    tracker = DraftKvTracker(ledger)
    blocks = table([1, 2], [1, 3])
    assert tracker.begin_step(["b", "a"], blocks, starts=positions(4, 0), ends=positions(6, 4)) == [0, 0]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=6),
    limit=st.integers(1, 17),
)
def test_refill_passes_cover_every_gap_once_and_are_as_few_as_possible(lengths: list[int], limit: int) -> None:
    gaps = [Gap(row, 3 * row, 3 * row + length) for row, length in enumerate(lengths)]
    passes = split_gaps(gaps, limit)
    assert len(passes) == -(-sum(lengths) // limit)
    fed: dict[int, int] = {gap.row: gap.start for gap in gaps}
    for pieces in passes:
        assert 0 < sum(piece.end - piece.start for piece in pieces) <= limit
        assert len({piece.row for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert piece.start == fed[piece.row]  # in order, without hole or overlap
            fed[piece.row] = piece.end
    assert fed == {gap.row: gap.end for gap in gaps}


class RealCache:
    """A small paged cache whose slots remember what draft KV is really in them, beside the ledger that must know.

    A slot's content is named by all tokens up to its own: draft KV is whole only if it was computed over whole KV.
    Full blocks go into a prefix cache; there are few blocks, so they change hands all the time.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tracker = DraftKvTracker(DraftKvLedger(SIMULATED_BLOCKS, BLOCK_SIZE))
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.cached: dict[tuple[int, ...], int] = {}
        self.sequences: dict[str, Request] = {}
        self.blocks = list(range(SIMULATED_BLOCKS))  # least recently used first
        self.gaps_seen = 0
        self.names = itertools.count()
        self.tokens = itertools.count(1)

    def act(self) -> None:
        """One thing that happens to an engine."""
        if not self.sequences or (len(self.sequences) < 2 and self.random.random() < 0.4):
            return self._arrive()
        name = self.random.choice(sorted(self.sequences))
        chance = self.random.random()
        if chance < 0.8:
            return self._step(name)
        return self._preempt(name) if chance < 0.88 else self._end(name)

    def _arrive(self) -> None:
        """A request: it continues a known prompt (found in the cache, block by block), or it is pulled, or new."""
        tokens: list[int] = []
        if self.cached and self.random.random() < 0.6:
            tokens = list(self.random.choice(sorted(self.cached)))
        self._admit(tokens + self._new(self.random.randint(1, 6)), pulled=self.random.random() < 0.4)

    def _admit(self, tokens: list[int], *, pulled: bool) -> None:
        sequence = Request(tokens)
        for end in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE):
            block = self.cached.get(tuple(tokens[:end]))
            if block is None:
                break
            sequence.blocks.append(block)
        self.sequences[f"s{next(self.names)}"] = sequence
        sequence.computed = len(sequence.blocks) * BLOCK_SIZE
        if pulled and self._grow(sequence, len(tokens)):
            own = sequence.blocks[sequence.computed // BLOCK_SIZE :]
            self.slots = {slot: held for slot, held in self.slots.items() if slot[0] not in own}
            self.tracker.ledger.mark_foreign(own)
            sequence.computed = len(tokens) - 1

    def _new(self, count: int) -> list[int]:
        return [next(self.tokens) for _ in range(count)]

    def _grow(self, sequence: "Request", end: int) -> bool:
        """Takes free blocks, out of the prefix cache if need be. False: there are not enough."""
        while len(sequence.blocks) * BLOCK_SIZE < end:
            used = {block for other in self.sequences.values() for block in other.blocks}
            free = [block for block in self.blocks if block not in used]
            if not free:
                return False
            self.blocks.remove(free[0])
            self.blocks.append(free[0])
            self.cached = {key: block for key, block in self.cached.items() if block != free[0]}
            sequence.blocks.append(free[0])
        return True

    def _step(self, name: str) -> None:
        """The target computes some tokens and drafts, of which some are rejected; the draft may run, or not."""
        sequence = self.sequences[name]
        start = sequence.computed
        verified = self.random.randint(start + 1, len(sequence.tokens))
        rejected = self.random.randint(0, 3) if verified == len(sequence.tokens) else 0
        if not self._grow(sequence, verified + rejected):
            return self._preempt(name)
        blocks = table(sequence.blocks)
        ends = positions(verified + rejected)
        (valid,) = self.tracker.begin_step([name], blocks, starts=positions(start), ends=ends)
        assert self._whole(sequence, valid), "a hole is not seen"
        assert valid == start or not self._whole(sequence, start), "a gap is seen where there is none"
        self.gaps_seen += valid < start
        self._write(sequence, range(start, verified + rejected), drafted=False)
        if self.random.random() < 0.6:
            refills = self.random.random() < 0.7
            if refills:
                self._write(sequence, range(valid, start), drafted=True)
            self._write(sequence, range(start, verified), drafted=True)
            if refills or valid == start:
                self.tracker.fed([name], blocks, starts=positions(valid), ends=ends)
        sequence.computed = verified
        for end in range(BLOCK_SIZE, verified + 1, BLOCK_SIZE):
            self.cached.setdefault(tuple(sequence.tokens[:end]), sequence.blocks[end // BLOCK_SIZE - 1])
        if verified == len(sequence.tokens):
            sequence.tokens += self._new(self.random.randint(1, 3))
        return None

    def _whole(self, sequence: "Request", end: int) -> bool:
        return all(
            self.slots.get((sequence.blocks[p // BLOCK_SIZE], p % BLOCK_SIZE)) == tuple(sequence.tokens[: p + 1])
            for p in range(end)
        )

    def _write(self, sequence: "Request", where: range, *, drafted: bool) -> None:
        for position in where:
            slot = (sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE)
            if drafted and self._whole(sequence, position):
                self.slots[slot] = tuple(sequence.tokens[: position + 1])
            else:
                self.slots.pop(slot, None)

    def _preempt(self, name: str) -> None:
        sequence = self.sequences.pop(name)
        self.tracker.forget([name])
        self._admit(sequence.tokens, pulled=False)

    def _end(self, name: str) -> None:
        del self.sequences[name]
        self.tracker.forget([name])


@dataclass(slots=True)
class Request:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


@pytest.mark.parametrize("seed", range(40))
def test_the_ledger_knows_what_is_in_the_cache(seed: int) -> None:
    cache = RealCache(seed)
    for _ in range(120):
        cache.act()
    assert cache.gaps_seen > 0


@pytest.mark.parametrize(("end", "valid"), [(0, 0), (1, 0), (4, 4), (5, 4), (8, 8)])
def test_only_full_blocks_count_where_a_sequence_is_new(end: int, valid: int) -> None:
    ledger = DraftKvLedger(NUM_BLOCKS, BLOCK_SIZE)
    ledger.mark(np.array([1, 2]), valid=True)
    assert ledger.leading_valid(np.array([1, 2]), end) == valid
