"""Rules that choose how many tokens to draft for each sequence of a batch.

A policy sees what was verified (`observe`), is asked once per engine step for the lengths of the batch (`lengths`) and
is told when a sequence ends (`forget`). On the CPU `observe` comes before `lengths` of the same step; on CUDA after it,
so that `lengths` follows from steps up to the one before. A policy must do with either. It knows nothing of the engine.
What it keeps per sequence has a fixed size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from specserve_workers.speculation.settings import BatchCap, PolicyName, SpeculationSettings

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
LARGEST_KLD_NATS: Final = 20.0


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What one engine step verified. Rows are sequences that had at least one draft token.

    `drafted_tokens` and `accepted_tokens` have shape [rows]. `kld_nats` has shape [rows, most drafted tokens]: the
    KL divergence of target from draft at each drafted position, NaN behind a row's last one and where it was not
    measured; None if nothing was measured.
    """

    sequence_ids: Sequence[str]
    drafted_tokens: IntArray
    accepted_tokens: IntArray
    kld_nats: FloatArray | None = None


class LengthPolicy(Protocol):
    """Chooses draft lengths. Not thread-safe: all calls come from the engine's step."""

    name: PolicyName
    needs_kld: bool  # whether `observe` uses `kld_nats`; it is measured only then

    def observe(self, step: VerifiedStep) -> None:
        """Learns from a step; at most once per step: before its `lengths` on the CPU, after it on CUDA."""

    def lengths(self, sequence_ids: Sequence[str]) -> list[int]:
        """The number of tokens to draft for each sequence of the batch; called once per step that could draft."""

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended; its id may come again for another one. Unknown ids are fine."""


class Off:
    """No drafts."""

    name: PolicyName = PolicyName.OFF
    needs_kld = False

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to learn."""

    def lengths(self, sequence_ids: Sequence[str]) -> list[int]:
        return [0] * len(sequence_ids)

    def forget(self, sequence_id: str) -> None:
        """Nothing is kept."""


class Static:
    """The same length for every sequence."""

    name: PolicyName = PolicyName.STATIC
    needs_kld = False

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to learn."""

    def lengths(self, sequence_ids: Sequence[str]) -> list[int]:
        return [self._tokens] * len(sequence_ids)

    def forget(self, sequence_id: str) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class DsdeParameters:
    """Constants of DSDE (arXiv 2509.01083). Where the paper is silent the source is named.

    The windows count drafted tokens, as in the authors' released code. What is ours: calibration over the long window
    (released code: 100 tokens, configurable), the neutral ratio when nothing varies (released code: 20, which would
    send a perfectly steady sequence to the minimum), and probing, which the paper does not need since its minimum is 2.
    """

    decay: float = 0.85  # weight of a value per token of age, paper section 3
    short_window_tokens: int = 10  # paper section 3
    long_window_tokens: int = 30  # paper section 3
    scale: float = 2.0  # factor in the exponent of SF, paper eq. 3
    calibration_tokens: int = 30  # drafted tokens of a sequence before its length is predicted
    calibration_start_tokens: int = 4  # first length of a sequence; doubles after a fully accepted step (released code)
    variance_floor: float = 1e-6  # below it a variance counts as zero (released code)
    probe_interval_steps: int = 16  # a sequence of length 0 drafts one token this often, else it would stay at 0


class DSDE:
    """Lengths from the stability of the KL divergence (arXiv 2509.01083), per sequence.

    WVIR = Var_w(last 10 KLDs) / Var_w(last 30), Var_w the weighted variance with weights decay^age   (eqs. 4-7)
    SF   = exp(2 * mean KLD of the last verified step) - 1                                              (eq. 3)
    SL   = (1 - SF * WVIR) * (SL_max - SL_min) + SL_min if SF * WVIR <= 1, else SL_min                  (eq. 8)
    SL_max = most tokens accepted in a step of calibration * (1 + mean KLD / largest KLD of it)         (eq. 1)
    cap  = batch mean of SL; the length is min(SL, cap), both rounded up                                (eqs. 9-11)

    SL_min is `min_tokens`; SL_max is held within [max(min_tokens, 1), max_tokens]. Calibrating sequences do not enter
    the mean and are not capped (as in the released code). KLDs that are not finite are dropped; a step without a finite
    one sends its sequence to SL_min.

    All state is in arrays with a row per sequence, so that a step costs a few numpy operations for the whole batch.
    """

    name: PolicyName = PolicyName.DSDE
    needs_kld = True

    def __init__(
        self,
        *,
        min_tokens: int,
        max_tokens: int,
        cap: BatchCap,
        parameters: DsdeParameters | None = None,
    ) -> None:
        self._parameters = parameters or DsdeParameters()
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._cap = cap
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._state = np.zeros(0, dtype=_state_dtype(self._parameters.long_window_tokens))
        ages = np.arange(self._parameters.long_window_tokens)
        self._weights: FloatArray = np.power(self._parameters.decay, ages, dtype=np.float64)

    def observe(self, step: VerifiedStep) -> None:
        if step.kld_nats is None or not len(step.sequence_ids):
            return
        rows = self._rows_of(step.sequence_ids)
        state = self._state[rows]
        finite = np.isfinite(step.kld_nats)
        # Rounding may take a divergence a little below 0; above, it is bounded by the floor of `divergence`.
        kld = np.clip(np.where(finite, step.kld_nats, np.nan), 0.0, LARGEST_KLD_NATS)
        counts = finite.sum(axis=1)
        sums = np.where(finite, kld, 0.0).sum(axis=1)
        means = np.divide(sums, counts, out=np.full(len(rows), np.inf), where=counts > 0)
        self._calibrate(state, step, kld=np.where(finite, kld, 0.0), sums=sums, counts=counts)
        state["history"] = _newest_first(state["history"], kld, counts)
        state["filled"] = np.minimum(state["filled"] + counts, self._parameters.long_window_tokens)
        state["predicted"] = self._predict(state, means)
        self._state[rows] = state

    def lengths(self, sequence_ids: Sequence[str]) -> list[int]:
        if not sequence_ids:
            return []
        rows = self._rows_of(sequence_ids)
        state = self._state[rows]
        predicted = state["predicted"]
        lengths = np.ceil(predicted).astype(np.int64)
        settled = state["proposed"] >= self._parameters.calibration_tokens
        if self._cap is BatchCap.MEAN and settled.any():
            cap = int(np.ceil(predicted[settled].mean()))
            lengths = np.where(settled, np.minimum(lengths, cap), lengths)
        lengths = np.where(settled, lengths, state["warm_up_length"])
        lengths = np.clip(lengths, self._min_tokens, self._max_tokens)
        idle = np.where(lengths == 0, state["idle_steps"] + 1, 0)
        probe = (idle >= self._parameters.probe_interval_steps) & (self._max_tokens > 0)
        self._state["idle_steps"][rows] = np.where(probe, 0, idle)
        return [int(length) for length in np.where(probe, 1, lengths)]

    def forget(self, sequence_id: str) -> None:
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)

    def _calibrate(
        self,
        state: NDArray[np.void],
        step: VerifiedStep,
        *,
        kld: FloatArray,
        sums: FloatArray,
        counts: IntArray,
    ) -> None:
        """Updates what SL_max and the length during calibration follow from, for rows still in it."""
        active = state["proposed"] < self._parameters.calibration_tokens
        state["proposed"] += np.where(active, step.drafted_tokens, 0)
        state["most_accepted"] = np.maximum(state["most_accepted"], np.where(active, step.accepted_tokens, 0))
        state["kld_sum"] += np.where(active, sums, 0.0)
        state["kld_count"] += np.where(active, counts, 0)
        state["kld_most"] = np.maximum(state["kld_most"], np.where(active, kld.max(axis=1), 0.0))
        full = active & (step.accepted_tokens >= step.drafted_tokens)
        doubled = np.minimum(state["warm_up_length"] * 2, self._max_tokens)
        state["warm_up_length"] = np.where(full, doubled, state["warm_up_length"])

    def _predict(self, state: NDArray[np.void], last_means: FloatArray) -> FloatArray:
        """SL of eq. 8 for each row, not rounded, in [min_tokens, max_tokens]; shape [rows]."""
        ratio = self._variance_ratio(state["history"], state["filled"])
        with np.errstate(over="ignore", invalid="ignore"):
            penalty = np.expm1(self._parameters.scale * last_means) * ratio
        penalty = np.where(np.isfinite(penalty), penalty, np.inf)
        longest = self._longest(state)
        return np.where(penalty <= 1.0, (1.0 - np.minimum(penalty, 1.0)) * (longest - self._min_tokens), 0.0) + (
            self._min_tokens
        )

    def _longest(self, state: NDArray[np.void]) -> FloatArray:
        """SL_max of eq. 1 for each row; shape [rows]."""
        mean = state["kld_sum"] / np.maximum(state["kld_count"], 1)
        bonus = mean / (state["kld_most"] + 1e-9)
        longest = state["most_accepted"] * (1.0 + bonus)
        least = min(max(self._min_tokens, 1), self._max_tokens)
        bounded: FloatArray = np.clip(longest, least, self._max_tokens)
        return bounded

    def _variance_ratio(self, history: FloatArray, filled: IntArray) -> FloatArray:
        """WVIR of eq. 4 for each row; 0 with fewer than two values, 1 where nothing varies. Shape [rows]."""
        short = _weighted_variance(history[:, : self._parameters.short_window_tokens], filled, weights=self._weights)
        long = _weighted_variance(history, filled, weights=self._weights)
        varies = long >= self._parameters.variance_floor
        ratio = np.divide(short, long, out=np.ones_like(long), where=varies)
        return np.where(filled < 2, 0.0, ratio)

    def _rows_of(self, sequence_ids: Sequence[str]) -> IntArray:
        """Rows of the state, made for sequences that are new."""
        rows = np.empty(len(sequence_ids), dtype=np.int64)
        for i, sequence_id in enumerate(sequence_ids):
            row = self._rows.get(sequence_id)
            rows[i] = self._new_row(sequence_id) if row is None else row
        return rows

    def _new_row(self, sequence_id: str) -> int:
        if not self._free:
            size = len(self._state)
            grown = np.zeros(max(16, 2 * size), dtype=self._state.dtype)
            grown[:size] = self._state
            self._state = grown
            self._free = list(range(len(grown) - 1, size - 1, -1))
        row = self._free.pop()
        fresh = np.zeros((), dtype=self._state.dtype)
        start = min(self._parameters.calibration_start_tokens, self._max_tokens)
        fresh["warm_up_length"] = max(start, self._min_tokens)
        self._state[row] = fresh
        self._rows[sequence_id] = row
        return row


def _state_dtype(window_tokens: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("history", np.float64, (window_tokens,)),  # KLDs, newest first
            ("filled", np.int64),  # how many of them are values
            ("proposed", np.int64),  # drafted tokens, counted until calibration ends
            ("most_accepted", np.int64),
            ("kld_sum", np.float64),
            ("kld_count", np.int64),
            ("kld_most", np.float64),
            ("warm_up_length", np.int64),
            ("predicted", np.float64),
            ("idle_steps", np.int64),
        ]
    )


def _newest_first(history: FloatArray, kld: FloatArray, counts: IntArray) -> FloatArray:
    """Puts the finite values of each row of `kld` (oldest first) in front of its history, and cuts to its length."""
    window = history.shape[1]
    # A stable sort brings the finite values of the reversed row to its front without changing their order.
    reversed_kld = kld[:, ::-1]
    order = np.argsort(~np.isfinite(reversed_kld), axis=1, kind="stable")
    fresh = np.take_along_axis(reversed_kld, order, axis=1)
    columns = np.arange(window)
    from_fresh = columns < counts[:, None]
    new = np.take_along_axis(fresh, np.minimum(columns, fresh.shape[1] - 1)[None, :].repeat(len(kld), 0), axis=1)
    old = np.take_along_axis(history, np.maximum(columns - counts[:, None], 0), axis=1)
    return np.where(from_fresh, new, old)


def _weighted_variance(values: FloatArray, filled: IntArray, *, weights: FloatArray) -> FloatArray:
    """Weighted variance around the weighted mean of the first `filled` values of each row; shape [rows]."""
    width = values.shape[1]
    w = np.where(np.arange(width) < filled[:, None], weights[:width], 0.0)
    total = np.maximum(w.sum(axis=1), 1e-12)
    mean = (w * values).sum(axis=1) / total
    variance: FloatArray = (w * (values - mean[:, None]) ** 2).sum(axis=1) / total
    return variance


def build_policy(settings: SpeculationSettings) -> LengthPolicy:
    """The policy that these settings name, without memory of earlier steps."""
    if settings.policy is PolicyName.OFF:
        return Off()
    if settings.policy is PolicyName.STATIC:
        return Static(settings.static_tokens)
    return DSDE(min_tokens=settings.min_tokens, max_tokens=settings.max_tokens, cap=settings.cap)
