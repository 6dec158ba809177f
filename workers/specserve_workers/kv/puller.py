"""Runs a consumer's pulls in a few threads and hands their ends to the engine's thread."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from specserve_workers.kv.client import Cancellation, FetchOrder, KvClient
from specserve_workers.kv.errors import KvTransferError, TransferCause

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedPull:
    """A pull that is over: `cause` None and the bytes loaded, or why it failed. Its blocks are written no more."""

    request_id: str
    block_ids: tuple[int, ...]
    num_bytes: int
    cause: TransferCause | None


class Puller:
    """Pulls of one worker process. Every pull that is submitted ends exactly once, whatever happens to it.

    One producer gets at most half of the threads, rounded up, so one that hangs leaves the others for the rest.

    Args:
        client: fetches; closed with the puller.
        num_threads: pulls at once; more wait for their turn, in the order they came.
        on_end: called after each end: in the pull's thread, or in that which cancels a pull that still waits.
    """

    def __init__(self, client: KvClient, *, num_threads: int, on_end: Callable[[], object] = lambda: None) -> None:
        self._client = client
        self._on_end = on_end
        self._num_threads = num_threads
        self._num_threads_per_address = (num_threads + 1) // 2
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="specserve-kv-pull")
        # Releases wait for connections of their own, never in front of a pull.
        self._release_thread = ThreadPoolExecutor(1, thread_name_prefix="specserve-kv-release")
        self._lock = threading.Lock()
        self._waiting: dict[str, FetchOrder] = {}
        self._running: dict[str, Cancellation] = {}
        self._running_by_address: Counter[str] = Counter()
        self._ended: list[EndedPull] = []

    def submit(self, request_id: str, order: FetchOrder) -> None:
        """Start a pull as soon as a thread is free for its address."""
        with self._lock:
            self._waiting[request_id] = order
            self._start_waiting()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cut the pulls of these requests, where there are any: a waiting one ends at once, a running one soon.

        The lease of one that never started is given up, since its producer would else hold it to its end.
        """
        with self._lock:
            request_ids = tuple(request_ids)
            running = [self._running[request_id] for request_id in request_ids if request_id in self._running]
            waiting = [(request_id, self._waiting.pop(request_id, None)) for request_id in request_ids]
        for cancellation in running:
            cancellation.cancel()
        for request_id, order in waiting:
            if order is not None:
                self.release(order.address, order.lease)
                self._end(request_id, order, cause=TransferCause.CANCELLED)

    def release(self, address: str, lease: bytes) -> None:
        """Give up one pull of a remote lease, in the background."""
        self._release_thread.submit(self._client.release, address, lease, pulls=1)

    def pop_ended(self) -> list[EndedPull]:
        """Return the pulls that ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def close(self) -> None:
        """Cut all pulls and wait for their threads; releases under way take at most their short limit."""
        with self._lock:
            request_ids = [*self._running, *self._waiting]
        self.cancel(request_ids)
        self._client.close()
        self._release_thread.shutdown(wait=True, cancel_futures=True)
        self._threads.shutdown(wait=True)

    def _start_waiting(self) -> None:
        """Give free threads to those that waited longest and whose address may have one. With the lock held."""
        for request_id, order in tuple(self._waiting.items()):
            if len(self._running) >= self._num_threads:
                return
            if self._running_by_address[order.address] >= self._num_threads_per_address:
                continue
            del self._waiting[request_id]
            cancellation = self._running[request_id] = Cancellation()
            self._running_by_address[order.address] += 1
            self._threads.submit(self._pull, request_id, order, cancellation)

    def _pull(self, request_id: str, order: FetchOrder, cancellation: Cancellation) -> None:
        num_bytes, cause = 0, None
        try:
            num_bytes = self._client.fetch(order, cancellation=cancellation)
        except KvTransferError as error:
            cause = error.cause
            logger.warning("KV of request %s was not loaded (%s): %s", request_id, cause.value, error)
        except Exception:
            # A pull that never ended would leave its request waiting for ever.
            cause = TransferCause.INTERNAL
            logger.exception("KV of request %s was not loaded", request_id)
        with self._lock:
            del self._running[request_id]
            self._running_by_address[order.address] -= 1
            if not self._running_by_address[order.address]:
                del self._running_by_address[order.address]
            self._start_waiting()
        self._end(request_id, order, num_bytes=num_bytes, cause=cause)

    def _end(self, request_id: str, order: FetchOrder, *, num_bytes: int = 0, cause: TransferCause | None) -> None:
        ended = EndedPull(request_id=request_id, block_ids=order.block_ids, num_bytes=num_bytes, cause=cause)
        with self._lock:
            self._ended.append(ended)
        self._on_end()
