"""Counters of speculation since the engine started, per policy; mirrors `SpeculationStats` of control.proto."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve_workers.speculation.settings import MAX_TOKENS_LIMIT, PolicyName


def _histogram() -> NDArray[np.int64]:
    return np.zeros(MAX_TOKENS_LIMIT + 1, dtype=np.int64)


@dataclass(slots=True)
class PolicyCounters:
    """What one policy has drafted. Lengths are counted in histograms: positions follow from them when asked for."""

    drafted_lengths: NDArray[np.int64] = field(default_factory=_histogram)
    accepted_lengths: NDArray[np.int64] = field(default_factory=_histogram)
    kld_sum_nats: float = 0.0
    kld_positions: int = 0

    def count(self, drafted_tokens: NDArray[np.int64], accepted_tokens: NDArray[np.int64]) -> None:
        """Adds verified sequences; both arrays have shape [sequences], drafted >= 1, accepted <= drafted."""
        size = MAX_TOKENS_LIMIT + 1
        self.drafted_lengths += np.bincount(drafted_tokens, minlength=size)
        self.accepted_lengths += np.bincount(accepted_tokens, minlength=size)

    def count_kld(self, kld_nats: NDArray[np.float64]) -> None:
        """Adds KL divergences of verified positions; values that are not finite are left out."""
        finite = np.isfinite(kld_nats)
        self.kld_sum_nats += float(np.sum(kld_nats, where=finite))
        self.kld_positions += int(np.count_nonzero(finite))

    def to_dict(self, policy: PolicyName) -> dict[str, Any]:
        """The fields of `PolicyStats`, the policy by its name in the run-time state."""
        drafted, accepted = _by_position(self.drafted_lengths), _by_position(self.accepted_lengths)
        return {
            "policy": policy.value,
            "verified_sequences": int(self.drafted_lengths.sum()),
            "drafted_tokens": sum(drafted),
            "accepted_tokens": sum(accepted),
            "drafted_by_position": drafted,
            "accepted_by_position": accepted + [0] * (len(drafted) - len(accepted)),
            "kld_sum_nats": self.kld_sum_nats,
            "kld_positions": self.kld_positions,
        }


def _by_position(lengths: NDArray[np.int64]) -> list[int]:
    """Number of sequences that reached each position, from the histogram of their lengths; no trailing zeros."""
    longer = np.cumsum(lengths[::-1])[::-1][1:]
    return [int(count) for count in longer[: np.count_nonzero(longer)]]


@dataclass(slots=True)
class SpeculationCounters:
    """Counters of one engine."""

    by_policy: dict[PolicyName, PolicyCounters] = field(default_factory=dict)
    refilled_sequences: int = 0
    refilled_tokens: int = 0
    draft_forwards: int = 0
    steps_without_draft: int = 0

    def of(self, policy: PolicyName) -> PolicyCounters:
        """The counters of one policy, made when it first runs."""
        return self.by_policy.setdefault(policy, PolicyCounters())

    def to_dict(self) -> dict[str, Any]:
        """The counters of `SpeculationStats` as plain values."""
        return {
            "by_policy": [counters.to_dict(policy) for policy, counters in self.by_policy.items()],
            "refilled_sequences": self.refilled_sequences,
            "refilled_tokens": self.refilled_tokens,
            "draft_forwards": self.draft_forwards,
            "steps_without_draft": self.steps_without_draft,
        }
