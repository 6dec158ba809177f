"""Counters of KV transfer: what a scheduler knows of requests, what each worker knows of bytes and leases.

A request is counted once, by the scheduler, however many ranks moved its shards. Bytes and transfers are counted
by every rank for its own shard.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from specserve_workers.kv.errors import TransferCause

_SUMMED_KEYS: Final = ("loaded_bytes", "served_bytes")
_FIRST_RANK_KEYS: Final = (
    "remote_prefills",
    "loaded_tokens",
    "served_transfers",
    "open_leases",
    "expired_leases",
    "refused_leases",
    "bad_tokens",
)


@dataclass(slots=True)
class RequestCounters:
    """Counts of requests, kept by the scheduler's side of the connector since the process started.

    Attributes:
        remote_prefills: requests whose prompt KV came from a prefill pod.
        loaded_tokens: their prompt tokens that came over the network, prefix-cache hits not among them.
        fallbacks: requests meant for remote prefill and prefilled here instead, by cause.
        refused_leases: prompts finished by this producer and not held, because too much was held already.
    """

    remote_prefills: int = 0
    loaded_tokens: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    refused_leases: int = 0

    def count_loaded(self, num_tokens: int) -> None:
        """Count one request whose prompt KV was loaded."""
        self.remote_prefills += 1
        self.loaded_tokens += num_tokens

    def count_fallback(self, cause: TransferCause) -> None:
        """Count one request that is prefilled here instead."""
        self.fallbacks[cause.value] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return a plain copy."""
        return {
            "remote_prefills": self.remote_prefills,
            "loaded_tokens": self.loaded_tokens,
            "fallbacks": dict(self.fallbacks),
            "refused_leases": self.refused_leases,
        }


class TransferCounters:
    """Counts of transfers of one worker process since it started. Thread-safe.

    `loaded_bytes` by the consumer; `served_transfers` and `served_bytes` by the producer, complete fetches and
    all bytes sent; `bad_tokens`: fetches with a token that names no lease.
    """

    _NAMES: Final = ("loaded_bytes", "served_transfers", "served_bytes", "bad_tokens")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter({name: 0 for name in self._NAMES})

    def add(self, name: str, count: int = 1) -> None:
        """Add to one of the counters above; another name is a KeyError."""
        if name not in self._NAMES:
            raise KeyError(name)
        with self._lock:
            self._counts[name] += count

    def to_dict(self) -> dict[str, int]:
        """Return a consistent copy."""
        with self._lock:
            return dict(self._counts)


def merge_rank_stats(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of all tensor-parallel ranks into those of the pod.

    Bytes are summed: each rank moves its own shard. Requests, leases and transfers are those of rank 0, which
    every rank repeats. Without ranks all is 0.
    """
    first: Mapping[str, Any] = per_rank[0] if per_rank else {}
    merged: dict[str, Any] = {key: int(first.get(key, 0)) for key in _FIRST_RANK_KEYS}
    merged |= {key: sum(int(stats.get(key, 0)) for stats in per_rank) for key in _SUMMED_KEYS}
    merged["fallbacks"] = dict(first.get("fallbacks", {}))
    return merged
