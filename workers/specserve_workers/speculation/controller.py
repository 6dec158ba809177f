"""The decisions of speculative decoding in one engine worker, step by step, without the engine.

Order of calls within one engine step, all from the engine's thread:

    begin_step      the target computes some positions of each sequence of the batch
    observe (CPU)   drafts of earlier steps were verified (only if there were any)
    plan            how many tokens to draft for each sequence, and what the draft model must be fed first
    drafted         the draft model was fed according to the plan
    observe (CUDA)  the same; only now are the results on the host without a wait of our own
    cut             each sequence keeps as many of the drafts as the plan gave it

So a plan follows from all that was verified up to this step on the CPU, and up to the step before on CUDA.

The target may also step without the draft model being asked (a sequence near the model's maximum length, for one): then
only `begin_step` is called, and the ledger knows of the gap.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve_workers.speculation.draft_kv import DraftKvLedger, DraftKvTracker, Gap, IntArray
from specserve_workers.speculation.policy import LengthPolicy, VerifiedStep, build_policy
from specserve_workers.speculation.settings import PolicyName, SpeculationSettings
from specserve_workers.speculation.stats import SpeculationCounters

# Takes rank 0's array to all ranks; every rank passes one of the same shape and gets rank 0's values.
Share = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one engine step; fields as for `DraftKvTracker.begin_step`."""

    sequence_ids: Sequence[str]
    block_table: IntArray
    starts: Sequence[int]
    ends: Sequence[int]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What to draft for a batch.

    `lengths` has one entry per row, 0 for rows that cannot use drafts. `passes` is the largest of them: the number of
    draft passes. With `passes` 0 the draft model still runs once where `feeds` is set, to keep its KV in step with a
    prompt that is being computed in chunks. `gaps` are to be fed before.
    """

    lengths: tuple[int, ...]
    passes: int
    feeds: bool
    gaps: tuple[Gap, ...] = ()

    @property
    def runs_draft(self) -> bool:
        return self.passes > 0 or self.feeds


@dataclass(slots=True)
class _Step:
    batch: Batch
    valid: list[int]  # valid draft prefix of each row before this step, gaps that are to be filled included
    plan: DraftPlan | None = None


@dataclass(slots=True)
class SpeculationController:
    """Policy, draft KV marks and counters of one worker.

    `share` brings rank 0's plan to all ranks: the number of draft passes and refills must be the same everywhere, or
    the ranks would wait for each other for ever. Without it (one rank) plans are used as they are.
    """

    started_max_tokens: int
    share: Share | None = None
    settings: SpeculationSettings = field(default_factory=SpeculationSettings)
    generation: int = 0
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)
    policy: LengthPolicy = field(init=False)
    _tracker: DraftKvTracker | None = None
    _step: _Step | None = None
    # Drafts that were handed to the scheduler and not verified yet: sequence -> policy that asked for them.
    _outstanding: dict[str, PolicyName] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = self.settings.limited(self.started_max_tokens)
        self.policy = build_policy(self.settings)

    def use_ledger(self, ledger: DraftKvLedger) -> None:
        """The KV cache exists; from here on its blocks are marked."""
        self._tracker = DraftKvTracker(ledger)

    def apply(self, settings: SpeculationSettings, generation: int) -> bool:
        """Puts settings in force, from the next plan on. False: newer ones are in force already.

        All ranks apply the same settings between the same two steps: the engine sends calls and steps to its ranks
        through one queue.
        """
        if generation < self.generation:
            return False
        limited = settings.limited(self.started_max_tokens)
        if limited != self.settings:
            self.settings = limited
            self.policy = build_policy(limited)
        self.generation = generation
        return True

    @property
    def measures_kld(self) -> bool:
        """Whether the sampler is to measure KL divergences. The same on all ranks."""
        return self.policy.needs_kld

    @property
    def is_off(self) -> bool:
        """Whether no plan can ask for drafts until other settings are applied. The same on all ranks."""
        return self.policy.name is PolicyName.OFF

    def begin_step(self, batch: Batch) -> None:
        """The target computes `batch` in this step."""
        self._step = None
        if self._tracker is None or not batch.sequence_ids:
            return
        valid = self._tracker.begin_step(batch.sequence_ids, batch.block_table, starts=batch.starts, ends=batch.ends)
        self._step = _Step(batch, valid)

    def end_sequences(self, finished: Iterable[str], displaced: Iterable[str] = ()) -> None:
        """`finished` sequences are gone; `displaced` ones were preempted and lost their blocks and drafts."""
        finished = tuple(finished)
        for sequence_id in finished:
            self.policy.forget(sequence_id)
        for sequence_id in (*finished, *displaced):
            self._outstanding.pop(sequence_id, None)
            if self._tracker is not None:
                self._tracker.forget((sequence_id,))

    def is_outstanding(self, sequence_id: str) -> bool:
        """Whether drafts of ours are being verified; the engine also pads with placeholders that nobody drafted."""
        return sequence_id in self._outstanding

    def observe(self, step: VerifiedStep) -> None:
        """Counts verified drafts and lets the policy learn from them. Rows that nobody drafted must be left out.

        Called before `plan` of the same step on the CPU, and between `plan` and `cut` on CUDA: see the module.
        """
        if not step.sequence_ids:
            return
        askers = [self._outstanding.pop(sequence_id, self.policy.name) for sequence_id in step.sequence_ids]
        kinds = set(askers)
        for asker in kinds:
            counters = self.counters.of(asker)
            rows = slice(None) if len(kinds) == 1 else [row for row, name in enumerate(askers) if name is asker]
            counters.count(step.drafted_tokens[rows], step.accepted_tokens[rows])
            if step.kld_nats is not None:
                counters.count_kld(step.kld_nats[rows])
        self.policy.observe(step)

    def plan(self, partial_prefill: NDArray[np.bool_]) -> DraftPlan:
        """Decides for the batch of the last `begin_step`. `partial_prefill`, shape [rows]: prompt not yet complete.

        Sequences with a partial prompt cannot use drafts yet, but their prompt is fed to the draft chunk by chunk, so
        that the last chunk has no long gap to fill.
        """
        step = self._step
        if step is None or self.is_off:
            return self._decided(DraftPlan((), 0, False))
        lengths, valid, starts = self.policy.lengths(step.batch.sequence_ids), step.valid, step.batch.starts
        if self.share is not None:
            # Lengths follow from floats of the first rank only, and blocks are marked by each rank's own connector,
            # so neither is taken for the same. The rest (batch, settings, partial prompts) comes from the scheduler
            # and is.
            lengths, valid = self.share(np.array([lengths, valid], dtype=np.int64)).tolist()
        usable_lengths, gaps, feeds = list(lengths), [], False
        for row, is_partial in enumerate(partial_prefill.tolist()):
            if not lengths[row]:
                continue
            if valid[row] < starts[row]:
                gaps.append(Gap(row, valid[row], starts[row]))
                valid[row] = starts[row]
            if is_partial:
                usable_lengths[row], feeds = 0, True
        step.valid = valid
        return self._decided(DraftPlan(tuple(usable_lengths), max(usable_lengths), feeds, tuple(gaps)))

    def _decided(self, plan: DraftPlan) -> DraftPlan:
        if self._step is not None:
            self._step.plan = plan
        return plan

    def drafted(self) -> None:
        """The draft model was fed the plan's gaps and the step's tokens of every row."""
        step = self._step
        if step is None or step.plan is None or self._tracker is None:
            return
        batch, gaps = step.batch, step.plan.gaps
        if not gaps and step.valid == batch.starts:
            self._tracker.fed(batch.sequence_ids, batch.block_table, starts=batch.starts, ends=batch.ends)
            return
        self.counters.refilled_sequences += len(gaps)
        self.counters.refilled_tokens += sum(gap.end - gap.start for gap in gaps)
        starts = list(batch.starts)
        for gap in gaps:
            starts[gap.row] = gap.start
        # Rows whose gap was left open were fed too, but behind a hole.
        rows = [row for row, valid in enumerate(step.valid) if valid == batch.starts[row]]
        self._tracker.fed(
            [batch.sequence_ids[row] for row in rows],
            batch.block_table[rows],
            starts=[starts[row] for row in rows],
            ends=[batch.ends[row] for row in rows],
        )

    def cut(self, sequence_ids: Sequence[str], drafts: Sequence[list[int]]) -> list[list[int]]:
        """Each sequence's own number of drafts, in the order given."""
        if self._step is None or self._step.plan is None or not self._step.plan.passes:
            return [[] for _ in sequence_ids]
        lengths = dict(zip(self._step.batch.sequence_ids, self._step.plan.lengths, strict=True))
        cut = [draft[: lengths.get(sequence_id, 0)] for sequence_id, draft in zip(sequence_ids, drafts, strict=True)]
        for sequence_id, draft in zip(sequence_ids, cut, strict=True):
            if draft:
                self._outstanding[sequence_id] = self.policy.name
        return cut

    def stats(self) -> dict[str, Any]:
        """The fields of `SpeculationStats` in control.proto; `in_force` as in the run-time state."""
        return {
            "in_force": self.settings.to_state(),
            "generation": self.generation,
            "started_max_tokens": self.started_max_tokens,
            **self.counters.to_dict(),
        }
