"""What a serving pod counts about its requests: the source of `GetStats` and of the `specserve_worker_*` metrics.

Everything here is touched from the server's event loop only, so nothing is locked.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Final

# Shared by all pods, so that histograms add up over pods: 0.5 ms to 150 s, each bound 20 % above the one before, which
# keeps a percentile read from them within 10 %.
LATENCY_BOUNDS_MS: Final[tuple[float, ...]] = tuple(round(0.5 * 1.2**i, 4) for i in range(70))


class FallbackCause(StrEnum):
    """Why a prompt that was meant to be prefilled remotely was prefilled here. A closed set: part of the protocol."""

    # Seen by the front end, before the engine has the request.
    NO_PEERS = "no_peers"  # the service name resolves to nothing
    PEERS_EXCLUDED = "peers_excluded"  # every peer failed a moment ago
    NO_IDENTITY = "no_identity"  # this pod has no valid certificate; the KV connector says so too
    PREFILL_IDENTITY = "prefill_identity"  # what answered has no certificate of this service's prefill pods
    PREFILL_CONNECT = "prefill_connect"  # no connection to the prefill pod's server
    PREFILL_TIMEOUT = "prefill_timeout"
    PREFILL_ERROR = "prefill_error"  # a 5xx, or the connection broke
    PREFILL_REFUSED = "prefill_refused"  # a 4xx, though this pod accepts the same request
    NOT_HELD = "not_held"  # prefilled, but the pod holds no more prompts at the moment
    BAD_ANSWER = "bad_answer"  # a 200 whose transfer parameters are not of the agreed form
    REVISION_MISMATCH = "revision_mismatch"  # the peer runs another target revision
    # Seen by the engine's KV connector, after a peer has prefilled: `specserve_workers.kv.errors.TransferCause`.
    BAD_PARAMS = "bad_params"
    UNSUPPORTED = "unsupported"
    PROMPT_MISMATCH = "prompt_mismatch"
    CONNECT = "connect"
    STALLED = "stalled"
    UNKNOWN_LEASE = "unknown_lease"
    LAYOUT_MISMATCH = "layout_mismatch"
    CHECKSUM = "checksum"
    PROTOCOL = "protocol"
    PRODUCER_BUSY = "producer_busy"
    PRODUCER_ERROR = "producer_error"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class RequestOutcome(StrEnum):
    """How a request ended, seen from its client."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # a 5xx, or cut after the first token
    REFUSED = "refused"  # a 4xx
    CANCELLED = "cancelled"  # the client went away


@dataclass(slots=True)
class LatencyHistogram:
    """Counts of values in milliseconds over fixed bounds; the last bucket is what lies above all bounds."""

    bounds_ms: tuple[float, ...] = LATENCY_BOUNDS_MS
    counts: list[int] = field(default_factory=list)
    sum_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds_ms) + 1)

    def observe(self, value_ms: float) -> None:
        """Counts a value in the first bucket whose upper bound is not below it."""
        self.counts[bisect_left(self.bounds_ms, value_ms)] += 1
        self.sum_ms += value_ms

    def cumulative(self, *, every: int = 1) -> Sequence[tuple[float, int]]:
        """(upper bound in ms, values up to it) for every n-th bound: the coarser histogram that is scraped."""
        running = list(accumulate(self.counts))
        return [(self.bounds_ms[i], running[i]) for i in range(every - 1, len(self.bounds_ms), every)]

    @property
    def total(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class ServingStats:
    """Counters since the process started.

    Tokens and time per output token come from the engine's own finished sequences, time to first token from the front
    end: only there does it include the prefill call.
    """

    started: int = 0
    outcomes: Counter[RequestOutcome] = field(default_factory=Counter)
    time_to_first_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    time_per_output_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    prompt_tokens: int = 0
    output_tokens: int = 0
    remote_prefill: LatencyHistogram = field(default_factory=LatencyHistogram)
    fallbacks: Counter[FallbackCause] = field(default_factory=Counter)
    released_leases: int = 0
    # Grows with every change that the engine's own numbers may follow.
    activity: int = 0

    @property
    def running(self) -> int:
        return self.started - sum(self.outcomes.values())

    def begin(self) -> None:
        self.started += 1
        self.activity += 1

    def end(self, outcome: RequestOutcome) -> None:
        self.outcomes[outcome] += 1
        self.activity += 1

    def observe_sequence(self, *, output_tokens: int, time_per_output_token_ms: float) -> None:
        """One finished sequence of the engine; sequences of one token have no time per output token."""
        if output_tokens >= 2:
            self.time_per_output_token.observe(time_per_output_token_ms)
