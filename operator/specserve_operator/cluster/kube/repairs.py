"""Bounds how often an object is put right, or deleted, that somebody else changes back each time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from specserve_operator.core.objects import ObjectRef

BURST: Final = 20
SECONDS_EACH: Final = 6.0


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class RepairLimit:
    """A bucket of `BURST` repairs or deletions for each object, filled by one in `SECONDS_EACH`.

    Two operators over one namespace, or a tool that keeps what this operator makes as it likes it, would else be
    answered at full speed, for ever.
    """

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._buckets: dict[ObjectRef, _Bucket] = {}

    def take(self, ref: ObjectRef) -> bool:
        """Whether the object may be put right now; counts as done if it may."""
        if not self.allows(ref):
            return False
        self._buckets[ref].tokens -= 1
        return True

    def allows(self, ref: ObjectRef) -> bool:
        """Whether the object may be put right now."""
        now = self._time()
        bucket = self._buckets.setdefault(ref, _Bucket(BURST, now))
        bucket.tokens = min(bucket.tokens + (now - bucket.filled_at) / SECONDS_EACH, BURST)
        bucket.filled_at = now
        return bucket.tokens >= 1

    def prune(self) -> None:
        """Forgets the objects whose buckets are full again."""
        full = self._time() - BURST * SECONDS_EACH
        self._buckets = {ref: bucket for ref, bucket in self._buckets.items() if bucket.filled_at > full}
