"""How often somebody may call. Pure: the time is an argument."""

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class RateLimit:
    """A bucket of tokens for each caller. The callers heard of last are remembered; one that is forgotten has all.

    Attributes:
        burst: calls at once after a long silence.
        per_second: calls a second in the long run.
        max_callers: how many are remembered.
    """

    burst: float
    per_second: float
    max_callers: int = 16_384
    _left: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, caller: str, now: float) -> bool:
        """Counts a call; False where it is one too many. `now` in seconds."""
        left, since = self._left.pop(caller, (self.burst, now))
        left = min(self.burst, left + max(0.0, now - since) * self.per_second)
        is_allowed = left >= 1.0
        self._left[caller] = (left - 1.0 if is_allowed else left, now)
        if len(self._left) > self.max_callers:
            self._left.popitem(last=False)
        return is_allowed
