"""Leases: which finished prompts a producer still holds, for whom, and until when.

A lease is named by a 128-bit random token; whoever knows the token may pull. It ends, and its blocks may be
reused, as soon as one of these is true:

* all its pulls are spent and none is under way. A pull is spent when it starts, however it ends: a consumer whose
  fetch broke prefills by itself and never comes back;
* it is released;
* it made no progress for the lease time. Every chunk that is read renews it, so a transfer that moves is never
  cut, and a consumer that hangs cannot hold blocks for longer than that time;
* the table is closed.

Blocks are read only inside `Pull.reading`, and a lease that ends meanwhile counts as ended when the read is over.
So blocks are never reused under a read, and no read starts after the end.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from specserve_workers.kv.errors import UnknownLeaseError

TOKEN_BYTES: Final = 16
MAX_EARLY_RELEASES: Final = 1024


def new_token() -> bytes:
    """Return 128 random bits from the operating system."""
    return secrets.token_bytes(TOKEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One finished prompt whose blocks are held for `pulls` pulls.

    Attributes:
        token: 16 random bytes.
        request_id: the producer's request that owns the blocks.
        block_ids: in prompt order; the last one may be partly filled.
        prompt_tokens: length of the prompt.
        prompt_sha256: 32 bytes, see `params.prompt_sha256`.
        pulls: how many fetches it allows, at least 1.
    """

    token: bytes
    request_id: str
    block_ids: tuple[int, ...]
    prompt_tokens: int
    prompt_sha256: bytes
    pulls: int = 1


class LeaseBudget:
    """Admission: how much of the KV cache finished prompts may hold. Not thread-safe (one scheduler owns it)."""

    def __init__(self, *, max_leases: int, max_blocks: int) -> None:
        self._max_leases = max_leases
        self._max_blocks = max_blocks
        self._blocks_by_request: dict[str, int] = {}
        self._held_blocks = 0

    @property
    def held_blocks(self) -> int:
        """Blocks of all requests that hold some."""
        return self._held_blocks

    def try_hold(self, request_id: str, num_blocks: int) -> bool:
        """Hold blocks for a request, or return False where that would pass a limit or the request holds some."""
        if request_id in self._blocks_by_request or len(self._blocks_by_request) >= self._max_leases:
            return False
        if self._held_blocks + num_blocks > self._max_blocks:
            return False
        self._blocks_by_request[request_id] = num_blocks
        self._held_blocks += num_blocks
        return True

    def free(self, request_id: str) -> None:
        """Give back what a request holds; nothing where it holds nothing."""
        self._held_blocks -= self._blocks_by_request.pop(request_id, 0)


@dataclass(slots=True, kw_only=True)
class _Entry:
    lease: Lease
    expires_at: float
    unstarted_pulls: int
    running_pulls: int = 0
    readers: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _EarlyRelease:
    pulls: int  # 0: all
    expires_at: float


@dataclass(slots=True)
class Pull:
    """One pull under way. Made by `LeaseTable.take`; `end` must be called once it is over, twice is harmless."""

    lease: Lease
    _table: "LeaseTable"
    _entry: _Entry
    _is_ended: bool = field(default=False)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the blocks while they are read, and renew the lease. Keep it short: one chunk.

        Raises `UnknownLeaseError` if the lease is over.
        """
        self._table._begin_read(self._entry)
        try:
            yield
        finally:
            self._table._end_read(self._entry)

    def end(self) -> bool:
        """Count this pull as over. Returns whether it was under way: True once."""
        return self._table._end_pull(self)


class LeaseTable:
    """All leases of one worker process. Thread-safe.

    The engine's thread grants, expires and collects the ended; the server's threads take, read and release.

    A release may come before the grant, of which this process hears only with the engine's next step. It is kept for
    the lease time and applied at the grant; of those that are kept, the oldest give way beyond `MAX_EARLY_RELEASES`,
    so that a stranger's tokens take no more memory than that.

    Args:
        lease_seconds: time without progress after which a lease ends.
        clock: seconds, never going back.
        on_end: called whenever a lease ends, in any thread and with the table locked: it must not call back.
    """

    def __init__(
        self,
        *,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._on_end = on_end
        self._changed = threading.Condition()
        self._entries: dict[bytes, _Entry] = {}
        self._early_releases: dict[bytes, _EarlyRelease] = {}  # oldest first
        self._ended_request_ids: set[str] = set()
        self._expired_count = 0
        self._is_closed = False

    @property
    def open_count(self) -> int:
        """Leases that can still be pulled or are being pulled."""
        with self._changed:
            return len(self._entries)

    @property
    def expired_count(self) -> int:
        """Leases that ended because their time was up."""
        with self._changed:
            return self._expired_count

    def grant(self, lease: Lease) -> None:
        """Open a lease, less what was released of it before. In a closed table it ends at once.

        Raises ValueError if its token or pulls are not valid.
        """
        if len(lease.token) != TOKEN_BYTES or lease.pulls < 1:
            raise ValueError(f"lease of request {lease.request_id}: needs {TOKEN_BYTES} bytes and a pull")
        with self._changed:
            if lease.token in self._entries:
                raise ValueError(f"lease of request {lease.request_id}: its token is in use")
            now = self._clock()
            entry = _Entry(lease=lease, expires_at=now + self._lease_seconds, unstarted_pulls=lease.pulls)
            early = self._early_releases.pop(lease.token, None)
            if self._is_closed:
                self._finish(entry)
                return
            self._entries[lease.token] = entry
            if early is not None and early.expires_at > now:
                self._give_up(entry, early.pulls)
            self._changed.notify_all()

    def take(self, token: bytes, *, wait_seconds: float = 0.0) -> Pull:
        """Start a pull, waiting up to `wait_seconds` for the lease to be granted.

        The consumer may ask before this worker has heard of the lease: the scheduler tells it at its next step.
        Raises `UnknownLeaseError`, the same for unknown, spent and expired leases.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_available(token), wait_seconds)
            if not self._is_available(token):
                raise UnknownLeaseError("unknown, spent or expired lease")
            entry = self._entries[token]
            entry.unstarted_pulls -= 1
            entry.running_pulls += 1
            self._renew(entry)
            return Pull(entry.lease, self, entry)

    def release(self, token: bytes, *, pulls: int = 0) -> bool:
        """Give up `pulls` unstarted pulls, or with 0 end the whole lease. Returns whether there was a lease.

        Where there is none yet, a lease granted within the lease time starts without these pulls.
        """
        with self._changed:
            entry = self._entries.get(token)
            if entry is None:
                self._release_early(token, pulls)
                return False
            self._give_up(entry, pulls)
            return True

    def expire(self) -> None:
        """End all leases whose time is up, also those with a pull under way that reads nothing."""
        with self._changed:
            now = self._clock()
            while self._early_releases and next(iter(self._early_releases.values())).expires_at <= now:
                del self._early_releases[next(iter(self._early_releases))]
            for entry in [e for e in self._entries.values() if e.expires_at <= now and not e.readers]:
                self._expired_count += 1
                self._finish(entry)

    def close(self) -> None:
        """End all leases, and every later one as it is granted."""
        with self._changed:
            self._is_closed = True
            self._early_releases.clear()
            for entry in list(self._entries.values()):
                self._finish(entry)

    def pop_ended(self) -> set[str]:
        """Return the request ids whose lease ended since the last call: each exactly once."""
        with self._changed:
            ended, self._ended_request_ids = self._ended_request_ids, set()
            return ended

    def has_ended(self) -> bool:
        """Whether `pop_ended` would return anything."""
        with self._changed:
            return bool(self._ended_request_ids)

    # Below: called with the lock held, except the three that `Pull` calls.

    def _is_available(self, token: bytes) -> bool:
        entry = self._entries.get(token)
        return entry is not None and entry.unstarted_pulls > 0

    def _renew(self, entry: _Entry) -> None:
        entry.expires_at = self._clock() + self._lease_seconds

    def _give_up(self, entry: _Entry, pulls: int) -> None:
        if pulls == 0:
            self._finish(entry)
            return
        entry.unstarted_pulls = max(0, entry.unstarted_pulls - pulls)
        self._finish_if_spent(entry)

    def _release_early(self, token: bytes, pulls: int) -> None:
        if self._is_closed or len(token) != TOKEN_BYTES:
            return
        earlier = self._early_releases.get(token)
        if earlier is None:
            if len(self._early_releases) >= MAX_EARLY_RELEASES:
                del self._early_releases[next(iter(self._early_releases))]
            expires_at = self._clock() + self._lease_seconds
        else:
            # Its time stays that of the first, so that the oldest come first.
            expires_at = earlier.expires_at
            pulls = earlier.pulls + pulls if earlier.pulls and pulls else 0
        self._early_releases[token] = _EarlyRelease(pulls=pulls, expires_at=expires_at)

    def _finish_if_spent(self, entry: _Entry) -> None:
        if entry.unstarted_pulls == 0 and entry.running_pulls == 0:
            self._finish(entry)

    def _finish(self, entry: _Entry) -> None:
        entry.is_over = True
        self._entries.pop(entry.lease.token, None)
        if entry.readers == 0:
            self._ended_request_ids.add(entry.lease.request_id)
            self._on_end()
        self._changed.notify_all()

    def _begin_read(self, entry: _Entry) -> None:
        with self._changed:
            if entry.is_over:
                raise UnknownLeaseError("the lease ended during the pull")
            entry.readers += 1
            self._renew(entry)

    def _end_read(self, entry: _Entry) -> None:
        with self._changed:
            entry.readers -= 1
            if entry.is_over:
                self._finish(entry)

    def _end_pull(self, pull: Pull) -> bool:
        with self._changed:
            if pull._is_ended:
                return False
            pull._is_ended = True
            pull._entry.running_pulls -= 1
            if not pull._entry.is_over:
                self._finish_if_spent(pull._entry)
            return True
