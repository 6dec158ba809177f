"""Fake pods that the tests of a module share, and waits for their statistics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specserve_protos.v1alpha1 import control_pb2 as pb
from tests.fakes.engine.process import FakePod
from tests.fakes.waiting import wait_until

PROMPT = (
    "A prefill pod reads the prompt and keeps what it has computed until a decode pod has fetched it, block by block. "
    "This text is long enough to fill several blocks of the cache."
)
PEERS = "peers-of-fake"
DRAFT = ("--draft-method", "DraftModel", "--draft-model", "org/draft", "--max-draft-tokens", "4")
# Longer than the engine's own numbers take to follow.
_SETTLE_SECONDS = 1.2
BLOCKS = ("--block-size", "16", "--some-flag-of-an-engine", "value")


@dataclass(frozen=True)
class Service:
    """A decode pod with a prefill pod, and one without."""

    prefill: FakePod
    decode: FakePod
    aggregated: FakePod

    @property
    def pods(self) -> tuple[FakePod, ...]:
        return self.prefill, self.decode, self.aggregated

    def reset(self) -> None:
        """Lets all behave as at their start."""
        for pod in self.pods:
            assert pod.request("DELETE", "/fake")[0] == 200


@contextmanager
def running_service(folder: Path) -> Iterator[Service]:
    """All three pods, ready."""
    flags = (*DRAFT, "--prefill-peers", f"{PEERS}:8000", "--kv-stall-timeout-ms", "300")
    service = Service(
        prefill=FakePod("prefill", folder, flags=("--kv-lease-seconds", "2"), engine_args=BLOCKS),
        decode=FakePod("decode", folder, flags=flags, engine_args=BLOCKS),
        aggregated=FakePod("decode", folder, engine_args=BLOCKS),
    )
    (folder / PEERS).write_text(service.prefill.host)
    try:
        for pod in service.pods:
            pod.start()
        for pod in service.pods:
            pod.wait_ready()
        yield service
    finally:
        for pod in service.pods:
            pod.kill()


def fallbacks(stats: pb.GetStatsResponse) -> dict[str, int]:
    """Prompts that were prefilled locally, by cause."""
    return {entry.cause: entry.count for entry in stats.kv_transfer.fallbacks}


def settled_stats(pod: FakePod) -> pb.GetStatsResponse:
    """Statistics that have stopped to move: the engine's own numbers of earlier requests have followed."""

    def read() -> pb.GetStatsResponse:
        stats = pod.stats()
        stats.ClearField("uptime_seconds")
        return stats

    last = read()
    while True:
        time.sleep(_SETTLE_SECONDS)
        if (now := read()) == last:
            return now
        last = now


def stats_when(pod: FakePod, condition: Callable[[pb.GetStatsResponse], object]) -> pb.GetStatsResponse:
    """The first statistics of which this is true: the engine's own numbers follow within a second or so."""
    return wait_until(lambda: stats if condition(stats := pod.stats()) else None)
