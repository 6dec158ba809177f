"""What the two halves of the KV connector tell each other: scheduler to workers each step, and workers back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from specserve_workers.kv.errors import TransferCause
from specserve_workers.kv.lease import Lease
from specserve_workers.kv.params import RemotePrefill


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """Load one request's prompt KV.

    Attributes:
        request_id: of the consumer.
        source: where it lies.
        first_block: leading blocks of the prompt that are cached here already.
        block_ids: where the blocks from `first_block` on go, in prompt order.
    """

    request_id: str
    source: RemotePrefill
    first_block: int
    block_ids: tuple[int, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One engine step's news from the scheduler, the same for all ranks.

    Attributes:
        grants: prompts that finished on this producer and are held from now on.
        pulls: loads to start.
        releases: remote prompts that will not be pulled; one pull of each is given up.
        is_idle: no tokens are computed in this step.
        request_counters: `RequestCounters.to_dict`, or None where nothing changed.
    """

    grants: tuple[Lease, ...] = ()
    pulls: tuple[PullOrder, ...] = ()
    releases: tuple[RemotePrefill, ...] = ()
    is_idle: bool = False
    request_counters: Mapping[str, Any] | None = None


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """One step's news from a worker: why which requests' loads failed."""

    causes: dict[str, TransferCause]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Merge two ranks' reports. Where both failed, the first rank's cause stands."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"expected a WorkerReport, not {type(other).__name__}")
        return WorkerReport(other.causes | self.causes)
