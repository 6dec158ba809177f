"""What a running engine can be told about speculation, as in the run-time state (docs/contracts.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeVar

MAX_TOKENS_LIMIT: Final = 64
E = TypeVar("E", bound=StrEnum)


class PolicyName(StrEnum):
    """Which rule chooses the draft length of a sequence."""

    OFF = "Off"  # no draft forward at all
    STATIC = "Static"  # the same length for every sequence
    DSDE = "DSDE"  # per sequence, from the stability of the KL divergence


class BatchCap(StrEnum):
    """Bound that the sequences of a batch put on each other's length. Used by DSDE."""

    NONE = "None"
    MEAN = "Mean"  # the batch mean of the predicted lengths


class SettingsError(ValueError):
    """A settings object that cannot be used. The message names the field."""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Lengths in tokens; 0 <= min_tokens <= max_tokens <= 64 and 0 <= static_tokens <= max_tokens."""

    policy: PolicyName = PolicyName.OFF
    cap: BatchCap = BatchCap.MEAN
    min_tokens: int = 0
    max_tokens: int = MAX_TOKENS_LIMIT
    static_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_tokens <= MAX_TOKENS_LIMIT:
            raise SettingsError(
                f"speculation.maxTokens must be between 0 and {MAX_TOKENS_LIMIT}, not {self.max_tokens}"
            )
        for field, value in (("minTokens", self.min_tokens), ("staticTokens", self.static_tokens)):
            if not 0 <= value <= self.max_tokens:
                raise SettingsError(
                    f"speculation.{field} must be between 0 and maxTokens ({self.max_tokens}), not {value}"
                )

    def limited(self, started_max_tokens: int) -> "SpeculationSettings":
        """These settings as an engine can carry them out that was started for `started_max_tokens` drafts.

        An engine without a drafter (0) can only be off.
        """
        most = min(self.max_tokens, started_max_tokens)
        return replace(
            self,
            policy=self.policy if started_max_tokens else PolicyName.OFF,
            max_tokens=most,
            min_tokens=min(self.min_tokens, most),
            static_tokens=min(self.static_tokens, most),
        )

    def to_state(self) -> dict[str, str | int]:
        """The `speculation` object of the run-time state file; the inverse of `parse_settings`."""
        return {
            "policy": self.policy.value,
            "cap": self.cap.value,
            "minTokens": self.min_tokens,
            "maxTokens": self.max_tokens,
            "staticTokens": self.static_tokens,
        }


_FIELDS: Final = ("policy", "cap", "minTokens", "maxTokens", "staticTokens")


def parse_settings(state: object) -> SpeculationSettings:
    """Reads the `speculation` object of the run-time state file.

    All five fields are required. Fields that are not known here are ignored, so that a newer operator can add some.
    Raises SettingsError naming the field.
    """
    if not isinstance(state, Mapping):
        raise SettingsError(f"speculation must be an object, not {type(state).__name__}")
    missing = [field for field in _FIELDS if field not in state]
    if missing:
        raise SettingsError(f"speculation.{missing[0]} is missing")
    return SpeculationSettings(
        policy=_member(PolicyName, state["policy"], "policy"),
        cap=_member(BatchCap, state["cap"], "cap"),
        min_tokens=_tokens(state["minTokens"], "minTokens"),
        max_tokens=_tokens(state["maxTokens"], "maxTokens"),
        static_tokens=_tokens(state["staticTokens"], "staticTokens"),
    )


def _member(kind: type[E], value: object, field: str) -> E:
    for member in kind:
        if member.value == value:
            return member
    raise SettingsError(f"speculation.{field} must be one of {', '.join(kind)}, not {value!r}")


def _tokens(value: object, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingsError(f"speculation.{field} must be a whole number, not {value!r}")
    return value
