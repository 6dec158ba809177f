"""How many tokens a step gives with the speculation that is in force, and the counters of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from specserve_workers.speculation.settings import PolicyName, SpeculationSettings, parse_settings

_KLD_NATS: Final = 0.1


@dataclass(slots=True)
class _PolicyCounters:
    """The fields of `PolicyStats` in control.proto."""

    verified_sequences: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    kld_positions: int = 0

    def count(self, drafted: int, accepted: int, *, times: int = 1) -> None:
        self.verified_sequences += times
        missing = drafted - len(self.drafted_by_position)
        self.drafted_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for position in range(drafted):
            self.drafted_by_position[position] += times
            self.accepted_by_position[position] += times * (position < accepted)

    def to_dict(self, policy: PolicyName) -> dict[str, Any]:
        return {
            "policy": policy.value,
            "verified_sequences": self.verified_sequences,
            "drafted_tokens": sum(self.drafted_by_position),
            "accepted_tokens": sum(self.accepted_by_position),
            "drafted_by_position": list(self.drafted_by_position),
            "accepted_by_position": list(self.accepted_by_position),
            "kld_sum_nats": _KLD_NATS * self.kld_positions,
            "kld_positions": self.kld_positions,
        }


class Drafting:
    """Speculation of a fake engine. With `started_max_tokens` 0 there is no drafter."""

    def __init__(self, *, started_max_tokens: int) -> None:
        self.started_max_tokens = started_max_tokens
        self.settings = SpeculationSettings(max_tokens=0)
        self.generation = 0
        self.refilled_sequences = self.refilled_tokens = 0
        self.draft_forwards = self.steps_without_draft = 0
        self._by_policy: dict[PolicyName, _PolicyCounters] = {}
        # Accepted tokens that are due, in parts of one.
        self._credit = 0.0

    def apply(self, settings: Mapping[str, Any], generation: int) -> dict[str, Any]:
        """Puts settings in force unless newer ones are, and says so as the worker does. Raises SettingsError."""
        wanted = parse_settings(settings).limited(self.started_max_tokens)
        is_applied = generation >= self.generation
        if is_applied:
            self.settings, self.generation = wanted, generation
        return {"applied": is_applied, "generation": self.generation, "in_force": self.settings.to_state()}

    def length(self, acceptance_ratio: float) -> int:
        """Draft tokens of a sequence's next step. DSDE drafts longer where more is accepted."""
        settings = self.settings
        if settings.policy is PolicyName.OFF:
            return 0
        if settings.policy is PolicyName.STATIC:
            return settings.static_tokens
        return settings.min_tokens + round((settings.max_tokens - settings.min_tokens) * acceptance_ratio)

    def step(self, length: int, acceptance_ratio: float, *, times: int = 1) -> int:
        """Counts a sequence's step, or several alike, with drafts of this length; returns the tokens accepted.

        Over many steps they are just the share that the behaviour asks for.
        """
        if length == 0:
            self.steps_without_draft += times
            return 0
        self._credit += length * acceptance_ratio * times
        accepted = min(length * times, int(self._credit + 1e-9))
        self._credit -= accepted
        self.draft_forwards += length * times
        counters = self._by_policy.setdefault(self.settings.policy, _PolicyCounters())
        each, rest = divmod(accepted, times)
        counters.count(length, each, times=times - rest)
        counters.count(length, each + 1, times=rest)
        if self.settings.policy is PolicyName.DSDE:
            counters.kld_positions += accepted + times
        return accepted

    def refill(self, num_tokens: int) -> None:
        """Counts the draft's pass over a prompt that came from another pod."""
        if self.started_max_tokens:
            self.refilled_sequences += 1
            self.refilled_tokens += num_tokens
            self.draft_forwards += 1

    def stats(self) -> dict[str, Any]:
        """The fields of `SpeculationStats` in control.proto, policies by name."""
        return {
            "by_policy": [counters.to_dict(policy) for policy, counters in self._by_policy.items()],
            "refilled_sequences": self.refilled_sequences,
            "refilled_tokens": self.refilled_tokens,
            "draft_forwards": self.draft_forwards,
            "steps_without_draft": self.steps_without_draft,
        }
