"""The worker's half of the KV connector: it owns the tensors, serves leased blocks and pulls remote ones.

Called from the engine's thread of one rank; pulls and the server run in their own threads.
"""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from specserve_workers.identity.channels import PeerTls, ServerTls, pool_rule
from specserve_workers.identity.material import MaterialFiles
from specserve_workers.identity.names import ServiceId
from specserve_workers.kv.address import grpc_target
from specserve_workers.kv.blocks import KvBlocks
from specserve_workers.kv.client import FetchOrder, KvClient
from specserve_workers.kv.config import ConnectorSettings
from specserve_workers.kv.errors import TransferCause
from specserve_workers.kv.foreign_blocks import notify_foreign_blocks
from specserve_workers.kv.layout import KvLayout
from specserve_workers.kv.lease import LeaseTable
from specserve_workers.kv.params import RemotePrefill
from specserve_workers.kv.puller import Puller
from specserve_workers.kv.server import KvTransferServer, KvTransferServicer, ServerLimits
from specserve_workers.kv.stats import RequestCounters, TransferCounters
from specserve_workers.vllm.connector_messages import StepMetadata, WorkerReport

logger = logging.getLogger(__name__)

DRAFT_LAYER_PREFIX: Final = "draft_model."
# While a prompt is held or on its way the engine runs empty steps without a pause. Waiting here for the next event
# leaves the core to those who move the bytes; a request that arrives meanwhile starts at most this much later.
_IDLE_STEP_WAIT_SECONDS: Final = 0.005


class ConnectorWorker:
    """One rank's half.

    Args:
        rank: tensor-parallel rank; it serves on and pulls from `port + rank`.
        is_producer, is_consumer: the roles of this engine.
    """

    def __init__(self, settings: ConnectorSettings, *, rank: int, is_producer: bool, is_consumer: bool) -> None:
        self._settings = settings
        self._rank = rank
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._counters = TransferCounters()
        self._request_counters: Mapping[str, Any] = RequestCounters().to_dict()
        self._has_news = threading.Event()
        self._leases = LeaseTable(lease_seconds=settings.lease_seconds, on_end=self._has_news.set)
        self._server: KvTransferServer | None = None
        self._puller: Puller | None = None
        self._is_idle_step = False
        self._causes: dict[str, TransferCause] = {}
        self._identity = _identity(settings)

    def register(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        num_blocks: int,
        block_size_tokens: int,
        instruction_set: str,
        tensor_parallel_size: int,
    ) -> None:
        """Take the KV cache's tensors, layer by name, and start to serve.

        Draft layers are left out: a prefill pod has none, and a decode pod fills them again by itself.
        Raises `KvServerError`, `BlockAxisError`.
        """
        target = {name: t for name, t in tensors.items() if not name.startswith(DRAFT_LAYER_PREFIX)}
        blocks = KvBlocks(target, num_blocks=num_blocks)
        layout = KvLayout(
            revision=self._settings.target_revision,
            dtype=str(next(iter(target.values())).dtype).removeprefix("torch."),
            block_size_tokens=block_size_tokens,
            instruction_set=instruction_set,
            tensor_parallel_size=tensor_parallel_size,
            layers=blocks.layouts,
        )
        if self._is_producer:
            self._serve(blocks, layout)
        if self._is_consumer:
            client = KvClient(
                blocks=blocks,
                layout=layout,
                connect_timeout_ms=self._settings.connect_timeout_ms,
                stall_timeout_ms=self._settings.stall_timeout_ms,
                tls=self._peer_tls(),
            )
            self._puller = Puller(client, num_threads=self._settings.pull_threads, on_end=self._has_news.set)

    def begin_step(self, metadata: StepMetadata) -> None:
        """Act on the scheduler's news before the step's forward, so that transfers run beside it."""
        self._is_idle_step = metadata.is_idle
        if metadata.request_counters is not None:
            self._request_counters = metadata.request_counters
        for lease in metadata.grants:
            self._leases.grant(lease)
        if self._puller is None:
            return
        for pull in metadata.pulls:
            order = FetchOrder(
                address=self._address(pull.source),
                lease=pull.source.lease,
                first_block=pull.first_block,
                block_ids=pull.block_ids,
                prompt_tokens=pull.source.prompt_tokens,
                prompt_sha256=pull.source.prompt_sha256,
            )
            self._puller.submit(pull.request_id, order)
        for source in metadata.releases:
            self._puller.release(self._address(source), source.lease)

    def end_step(self, finished_request_ids: set[str]) -> KVConnectorTransferResults:
        """Return which requests' blocks are let go and which have arrived or failed, each request once."""
        self._leases.expire()
        if self._puller is not None:
            self._puller.cancel(finished_request_ids)
        if self._is_idle_step:
            self._has_news.wait(_IDLE_STEP_WAIT_SECONDS)
        # Cleared before collecting: what ends in between is collected now and wakes the next step in vain.
        self._has_news.clear()
        results = KVConnectorTransferResults(finished_sending=self._leases.pop_ended())
        for pull in self._puller.pop_ended() if self._puller is not None else ():
            notify_foreign_blocks(pull.block_ids)
            results.finished_recving.add(pull.request_id)
            if pull.cause is None:
                self._counters.add("loaded_bytes", pull.num_bytes)
            else:
                results.failed_recving.add(pull.request_id)
                self._causes[pull.request_id] = pull.cause
        return results

    def take_report(self) -> WorkerReport | None:
        """Return why loads failed in this step, or None."""
        causes, self._causes = self._causes, {}
        return WorkerReport(causes) if causes else None

    def stats(self) -> dict[str, Any]:
        """Return this rank's numbers since the process started: see `kv.stats.merge_rank_stats`."""
        return {
            **self._request_counters,
            **self._counters.to_dict(),
            "open_leases": self._leases.open_count,
            "expired_leases": self._leases.expired_count,
        }

    def close(self) -> None:
        """Cut all transfers and end all leases."""
        self._leases.close()
        if self._server is not None:
            self._server.stop()
        if self._puller is not None:
            self._puller.close()

    def _serve(self, blocks: KvBlocks, layout: KvLayout) -> None:
        limits = ServerLimits(max_streams=self._settings.max_streams)
        servicer = KvTransferServicer(
            blocks=blocks, layout=layout, leases=self._leases, counters=self._counters, limits=limits
        )
        self._server = KvTransferServer(
            servicer,
            host=self._settings.host,
            port=self._settings.port + self._rank,
            limits=limits,
            tls=self._server_tls(),
        )
        self._server.start()
        logger.info("KV of %d layers is served on %s:%d", len(layout.layers), self._settings.host, self._server.port)

    def _server_tls(self) -> ServerTls | None:
        """KV caches go to decode pods of the same service, and to nobody else."""
        if self._identity is None:
            return None
        files, service = self._identity
        return ServerTls(files, pool_rule(service, pool="decode"))

    def _peer_tls(self) -> PeerTls | None:
        if self._identity is None:
            return None
        files, service = self._identity
        return PeerTls(files, service, pool="prefill")

    def _address(self, source: RemotePrefill) -> str:
        return grpc_target(source.host, source.port + self._rank)


def _identity(settings: ConnectorSettings) -> tuple[MaterialFiles, ServiceId] | None:
    """The certificate that the pod's first process keeps for all of them; None for plaintext."""
    if not settings.identity_directory:
        return None
    return MaterialFiles(Path(settings.identity_directory)), ServiceId(settings.namespace, settings.service)
