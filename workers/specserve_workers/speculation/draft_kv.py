"""Which blocks of the KV cache hold the draft model's keys and values.

The target writes KV for every token it computes; the draft model only for those it was fed. Where it was not fed (while
speculation was off, in blocks pulled from another pod, in blocks of the prefix cache that were filled at such a time),
the draft's slots hold garbage and a drafter that attends to them is accepted less often, without any error. So for each
running sequence the length of its valid prefix is kept, and each block has a mark: whether all its slots are valid. A
sequence's *gap* is what lies between its valid prefix and the first token of the present step; it is fed to the draft
before drafting.

Why a mark per block is enough: a sequence takes over blocks only from the prefix cache, which holds full ones, and what
it does with its own is known from its prefix. So marks change only when a block is filled, which is seldom: a decoding
sequence fills one in every `block_size` tokens. Draft KV at a position depends on all earlier ones, so positions fed
behind a gap do not count as valid.

A step costs a few operations per sequence on plain integers; arrays would cost more for all batches but the largest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


class DraftKvLedger:
    """Marks of all blocks of one KV cache.

    `mark` may be called from any thread for blocks that are not in use by a running sequence.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.block_size_tokens = block_size_tokens
        self._valid = np.zeros(num_blocks, dtype=np.bool_)

    def mark(self, blocks: IntArray, *, valid: bool) -> None:
        """All slots of these blocks hold draft KV over valid draft KV, or they do not."""
        self._valid[blocks] = valid

    def mark_foreign(self, block_ids: Sequence[int]) -> None:
        """These blocks were filled with KV from elsewhere, without the draft's part."""
        self.mark(np.asarray(block_ids, dtype=np.int64), valid=False)

    def leading_valid(self, blocks: IntArray, end: int) -> int:
        """Tokens before `end` in full valid blocks, counted from the first token of a sequence with these blocks."""
        full = end // self.block_size_tokens
        invalid = np.flatnonzero(~self._valid[blocks[:full]])
        return int(invalid[0] if len(invalid) else full) * self.block_size_tokens


class DraftKvTracker:
    """Length of the valid draft prefix of every running sequence, kept in step with the ledger.

    Once per engine step: `begin_step`, and, if the draft runs, `fed` for the rows it was fed contiguously.
    `block_table` has shape [rows, blocks per sequence] and holds the blocks of each sequence in order; `starts` and
    `ends` are token positions, one per row, the end not included.
    """

    def __init__(self, ledger: DraftKvLedger) -> None:
        self.ledger = ledger
        self._valid: dict[str, int] = {}

    def begin_step(
        self, sequence_ids: Sequence[str], block_table: IntArray, *, starts: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        """The target computes positions [start, end) of each row in this step.

        Returns the number of valid tokens before `start` of each row. A sequence that is new here (or came back after
        `forget`) is looked up in the ledger, block by block.
        """
        # Before the look-ups: one row of a step may be given a block that another fills in it.
        self._mark_filled(block_table, starts, ends, valid=False)
        known = self._valid
        for row, sequence_id in enumerate(sequence_ids):
            start = starts[row]
            valid = known.get(sequence_id)
            if valid is None:
                known[sequence_id] = self.ledger.leading_valid(block_table[row], start)
            elif valid > start:
                # Tokens were rejected, or are computed again.
                known[sequence_id] = start
        return [known[sequence_id] for sequence_id in sequence_ids]

    def fed(
        self, sequence_ids: Sequence[str], block_table: IntArray, *, starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """The draft was fed [start, end) of these rows, and everything before `start` is valid.

        `end` may include drafted tokens that turn out to be rejected: their slots are written again, and marked anew
        when their block is filled, by later steps of the sequence.
        """
        self._mark_filled(block_table, starts, ends, valid=True)
        self._valid.update(zip(sequence_ids, ends, strict=True))

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """The sequences are finished or lost their blocks."""
        for sequence_id in sequence_ids:
            self._valid.pop(sequence_id, None)

    def _mark_filled(self, block_table: IntArray, starts: Sequence[int], ends: Sequence[int], *, valid: bool) -> None:
        size = self.ledger.block_size_tokens
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            first, last = start // size, end // size
            if first != last:
                self.ledger.mark(block_table[row, first:last], valid=valid)


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
