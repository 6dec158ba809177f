"""Which prefill pod is asked next, and how long it may take. Pure: the time is an argument."""

from collections.abc import Iterable
from dataclasses import dataclass, field

EXCLUSION_SECONDS = 2.0
MAX_TRIES = 2


@dataclass(slots=True)
class PeerRotation:
    """Round robin over the peers that have not failed a moment ago."""

    exclusion_seconds: float = EXCLUSION_SECONDS
    _next: int = 0
    _excluded_until: dict[str, float] = field(default_factory=dict)

    def choose(self, peers: Iterable[str], *, now: float) -> list[str]:
        """At most two different peers, in the order in which to try them."""
        self._excluded_until = {peer: until for peer, until in self._excluded_until.items() if until > now}
        usable = [peer for peer in peers if peer not in self._excluded_until]
        if not usable:
            return []
        first = self._next % len(usable)
        self._next += 1
        return (usable[first:] + usable[:first])[:MAX_TRIES]

    def exclude(self, peer: str, *, now: float) -> None:
        self._excluded_until[peer] = now + self.exclusion_seconds


@dataclass(slots=True)
class PrefillTimeModel:
    """Learns the time of a prefill call as seconds per byte of its body, queueing included.

    An exponentially weighted mean; the deadline leaves three times the predicted time, so that a peer under load is
    not given up too soon, and a hung one is.
    """

    floor_seconds: float = 5.0
    untaught_seconds: float = 60.0
    factor: float = 3.0
    weight: float = 0.2
    # Below this many bytes a call's fixed cost is most of it, and says nothing about long prompts.
    min_bytes: int = 4096
    seconds_per_byte: float | None = None

    def deadline_seconds(self, num_bytes: int) -> float:
        """How long a call with a body of this size may take in all."""
        if self.seconds_per_byte is None:
            return self.untaught_seconds
        return max(self.floor_seconds, self.factor * self.seconds_per_byte * max(num_bytes, self.min_bytes))

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Takes in a finished call. One that timed out is observed with its whole deadline, so that the next may take
        longer: a deadline that nobody can meet does not stay."""
        rate = seconds / max(num_bytes, self.min_bytes)
        if self.seconds_per_byte is None:
            self.seconds_per_byte = rate
        else:
            self.seconds_per_byte += self.weight * (rate - self.seconds_per_byte)
