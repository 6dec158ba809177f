"""Which slots of the KV cache hold the draft model's keys and values.

The target writes KV for every token it computes; the draft model only for those it was fed. Where it was not fed (while
speculation was off, in blocks pulled from another pod, in blocks of the prefix cache that were filled at such a time),
the draft's slots hold garbage and a drafter that attends to them is accepted less often, without any error. So each
block has a mark: the number of slots, counted from its start, whose draft KV is valid. A sequence's *gap* is what lies
between its valid prefix and the first token of the present step; it is fed to the draft before drafting.

Why a count per block is enough: slots of a block are written in order, and a block that gets a new owner is written
again from slot 0, which sets its mark to 0. Draft KV at a position depends on all earlier ones, so positions fed
behind a gap do not count as valid.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


class DraftKvLedger:
    """Marks of all blocks of one KV cache.

    `block_table` arguments have shape [rows, blocks per sequence] and hold the blocks of each sequence in order;
    `starts` and `ends` have shape [rows] and are token positions, the end not included.
    `mark_foreign` may be called from any thread for blocks that are not in use by a running sequence.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.block_size_tokens = block_size_tokens
        self.valid_slots = np.zeros(num_blocks, dtype=np.int32)
        self._last: tuple[tuple[IntArray, IntArray, IntArray], tuple[IntArray, IntArray, IntArray]] | None = None

    def written(self, block_table: IntArray, starts: IntArray, ends: IntArray) -> None:
        """The target wrote these positions; whatever draft KV was there belongs to something else now."""
        blocks, low, _ = self._slots(block_table, starts, ends)
        self.valid_slots[blocks] = np.minimum(self.valid_slots[blocks], low)

    def drafted(self, block_table: IntArray, starts: IntArray, ends: IntArray) -> None:
        """The draft was fed these positions, and all positions before them are valid."""
        blocks, _, high = self._slots(block_table, starts, ends)
        self.valid_slots[blocks] = np.maximum(self.valid_slots[blocks], high)

    def leading_valid(self, blocks: IntArray, end: int) -> int:
        """Number of tokens before `end` with valid draft KV, counted from the sequence's first token."""
        size = self.block_size_tokens
        used = blocks[: -(-end // size)]
        short = np.flatnonzero(self.valid_slots[used] < size)
        if not len(short):
            return end
        first = int(short[0])
        return min(end, first * size + int(self.valid_slots[used[first]]))

    def mark_foreign(self, block_ids: Sequence[int]) -> None:
        """These blocks were filled with KV from elsewhere, without the draft's part."""
        self.valid_slots[np.asarray(block_ids, dtype=np.int64)] = 0

    def _slots(self, block_table: IntArray, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The blocks that the ranges touch, each with its first touched slot and the end of the touched slots.

        A step without gaps asks twice for the same arrays; the answer is kept for the second time.
        """
        arguments = (block_table, starts, ends)
        if self._last is not None and all(a is b for a, b in zip(self._last[0], arguments, strict=True)):
            return self._last[1]
        size = self.block_size_tokens
        rows = np.arange(len(starts))
        index = starts // size
        counts = (ends + (size - 1)) // size - index
        if not (counts == 1).all():
            counts = np.maximum(counts, 0) * (ends > starts)
            offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            rows = np.repeat(rows, counts)
            index = index[rows] + offsets
            starts, ends = starts[rows], ends[rows]
        base = index * size
        touched = (block_table[rows, index], np.maximum(starts - base, 0), np.minimum(ends - base, size))
        self._last = (arguments, touched)
        return touched


class DraftKvTracker:
    """Length of the valid draft prefix of every running sequence, kept in step with the ledger.

    Once per engine step: `begin_step`, and, if the draft runs, `fed` for the rows it was fed contiguously.
    """

    def __init__(self, ledger: DraftKvLedger) -> None:
        self.ledger = ledger
        self._valid: dict[str, int] = {}

    def begin_step(
        self, sequence_ids: Sequence[str], block_table: IntArray, *, starts: IntArray, ends: IntArray
    ) -> IntArray:
        """The target computes positions [start, end) of each row in this step.

        Returns the number of valid tokens before `start` of each row, shape [rows]. A sequence that is new here (or
        came back after `forget`) is looked up in the ledger, block by block.
        """
        valid = np.empty(len(sequence_ids), dtype=np.int64)
        for row, sequence_id in enumerate(sequence_ids):
            start = int(starts[row])
            known = self._valid.get(sequence_id)
            # A start below what is known means that tokens were rejected or are computed again.
            valid[row] = self.ledger.leading_valid(block_table[row], start) if known is None else min(known, start)
        self.ledger.written(block_table, starts, ends)
        self._valid.update(zip(sequence_ids, valid.tolist(), strict=True))
        return valid

    def fed(self, sequence_ids: Sequence[str], block_table: IntArray, *, starts: IntArray, ends: IntArray) -> None:
        """The draft was fed [start, end) of these rows, and everything before `start` is valid.

        `end` may include drafted tokens that turn out to be rejected: their slots are written again, and marked anew,
        by the next step of the sequence.
        """
        self.ledger.drafted(block_table, starts, ends)
        self._valid.update(zip(sequence_ids, ends.tolist(), strict=True))

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """The sequences are finished or lost their blocks."""
        for sequence_id in sequence_ids:
            self._valid.pop(sequence_id, None)


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions [start, end) of the sequence in row `row` of the batch that the draft has not seen."""

    row: int
    start: int
    end: int


def split_gaps(gaps: Sequence[Gap], limit_tokens: int) -> list[list[Gap]]:
    """Passes that fill the gaps, in order; each has at most `limit_tokens` tokens and one piece of a row.

    The number of passes is the least possible, ceil(tokens / limit).
    """
    passes: list[list[Gap]] = []
    room = 0
    for gap in gaps:
        start = gap.start
        while start < gap.end:
            if room == 0:
                passes.append([])
                room = limit_tokens
            end = min(gap.end, start + room)
            passes[-1].append(Gap(gap.row, start, end))
            room -= end - start
            start = end
    return passes
