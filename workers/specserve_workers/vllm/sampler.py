"""Verification as the engine does it, watched: accepted drafts and KL divergences per sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specserve_workers.speculation.controller import SpeculationController
from specserve_workers.speculation.divergence import kl_divergence_nats
from specserve_workers.speculation.policy import VerifiedStep

REJECTED_TOKEN_ID = -1


@dataclass(slots=True)
class DraftLogits:
    """The draft model's logits of the last drafting: one tensor [rows, vocabulary] per pass, unscaled."""

    passes: list[torch.Tensor] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        self.passes = []
        self.rows = {}


@dataclass(slots=True)
class _Pending:
    """A verified step whose numbers may still be on their way from the device."""

    sequence_ids: list[str]
    rows: NDArray[np.int64]  # of the batch
    drafted: NDArray[np.int64]  # same order
    sampled_counts: torch.Tensor | NDArray[np.int64]  # [rows of the batch], on the host
    kld: torch.Tensor | None  # [drafts of the measured rows], on the host
    kld_rows: NDArray[np.int64]  # index into `rows` of each of them
    kld_positions: NDArray[np.int64]


class WatchedRejectionSampler:
    """The engine's rejection sampler with the same arguments and results. Not a module: it has no weights.

    On a device other than the CPU nothing here waits for it: results are copied to pinned memory behind the sampling
    and are read by `collect`, which the worker calls after the engine itself has waited for the sampled tokens.
    """

    def __init__(
        self,
        inner: torch.nn.Module,
        controller: SpeculationController,
        *,
        input_batch: Any,
        draft_logits: DraftLogits,
        measures: bool,
    ) -> None:
        """`measures` False on all ranks but the first: one set of divergences is enough, the plan is shared."""
        self.inner = inner
        self._controller = controller
        self._input_batch = input_batch
        self._draft_logits = draft_logits
        self._measures = measures
        self._pending: _Pending | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)  # not yet set: there is nothing to ask
        return getattr(self.inner, name)

    def watch(self, input_batch: Any) -> None:
        """The runner's batch, whose rows are the rows of what is sampled."""
        self._input_batch = input_batch

    def __call__(
        self, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        sequence_ids, rows = self._drafted_rows(metadata.num_draft_tokens)
        if not sequence_ids:
            return self.inner(metadata, draft_probs, logits, sampling_metadata)
        drafted = np.array(metadata.num_draft_tokens, dtype=np.int64)
        # The engine may scale the logits in place, so they are read before it does.
        kld, kld_rows, kld_positions = self._measure(
            metadata, logits, sampling_metadata, sequence_ids=sequence_ids, rows=rows, drafted=drafted
        )
        output = self.inner(metadata, draft_probs, logits, sampling_metadata)
        counts = _count_sampled(output.sampled_token_ids)
        self._pending = _Pending(sequence_ids, rows, drafted[rows], counts, kld, kld_rows, kld_positions)
        if logits.device.type == "cpu":
            self.collect()
        return output

    def collect(self) -> None:
        """Hands the last verified step to the controller. On a device: only after the engine's own wait."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        kld = None
        if pending.kld is not None:
            kld = np.full((len(pending.rows), int(pending.drafted.max())), np.nan)
            kld[pending.kld_rows, pending.kld_positions] = pending.kld.numpy()
        accepted = np.asarray(pending.sampled_counts)[pending.rows].astype(np.int64) - 1
        self._controller.observe(VerifiedStep(pending.sequence_ids, pending.drafted, np.maximum(accepted, 0), kld))

    def _drafted_rows(self, num_draft_tokens: Sequence[int]) -> tuple[list[str], NDArray[np.int64]]:
        """Sequences with drafts that we made. Placeholders of the scheduler and warm-up batches are not among them."""
        is_ours = self._controller.is_outstanding
        ids = self._input_batch.req_ids
        found = [
            (sequence_id, row)
            for row, (sequence_id, count) in enumerate(zip(ids, num_draft_tokens, strict=False))
            if count and is_ours(sequence_id)
        ]
        return [sequence_id for sequence_id, _ in found], np.array([row for _, row in found], dtype=np.int64)

    def _measure(
        self,
        metadata: Any,
        logits: torch.Tensor,
        sampling_metadata: Any,
        *,
        sequence_ids: list[str],
        rows: NDArray[np.int64],
        drafted: NDArray[np.int64],
    ) -> tuple[torch.Tensor | None, NDArray[np.int64], NDArray[np.int64]]:
        """Divergence of every drafted position whose draft logits are at hand, with its row and position.

        A sequence whose drafts are older than the last drafting has none; the others are measured all the same.
        """
        nothing = np.zeros(0, dtype=np.int64)
        kept = self._draft_logits
        if not (self._measures and self._controller.measures_kld and kept.passes):
            return None, nothing, nothing
        draft_rows = np.array([kept.rows.get(sequence_id, -1) for sequence_id in sequence_ids])
        known = np.flatnonzero(draft_rows >= 0)
        if not len(known):
            return None, nothing, nothing
        lengths = np.minimum(drafted[rows[known]], len(kept.passes))
        index = np.repeat(known, lengths)
        positions = np.arange(len(index)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        flat = (np.cumsum(drafted) - drafted)[rows[index]] + positions
        device = logits.device
        targets = metadata.target_logits_indices[_to_device(flat, device)]
        # Pass p, row r of the kept logits is row p * (rows of the drafting) + r of their concatenation.
        drafts = positions * kept.passes[0].shape[0] + draft_rows[index]
        temperatures = sampling_metadata.temperature
        if temperatures is not None:
            temperatures = temperatures[_to_device(rows[index], device)]
        kld = kl_divergence_nats(
            logits[targets],
            torch.cat(kept.passes)[_to_device(drafts, device)],
            temperatures=temperatures,
        )
        return _to_host(kld), index, positions


def _count_sampled(token_ids: torch.Tensor) -> torch.Tensor | NDArray[np.int64]:
    """Tokens of each row that were accepted or sampled, [rows], on the host."""
    if token_ids.device.type == "cpu":
        return np.count_nonzero(token_ids.numpy() != REJECTED_TOKEN_ID, axis=1)
    return _to_host((token_ids != REJECTED_TOKEN_ID).sum(1, dtype=torch.int32))


def _to_device(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host; from a device without waiting for the copy to end."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
