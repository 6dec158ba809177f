"""vLLM's KV connector of specserve: prompt KV from a prefill pod to a decode pod over gRPC.

`specserve_workers.kv.config.kv_transfer_config(role, host=..., port=..., ...)` returns the value of vLLM's
`--kv-transfer-config` that loads it. `kv_stats()` below, called in the worker process, returns its numbers.

How a request runs. Producer: a request with `do_remote_decode` finishes, its blocks stay held under a lease, and the
answer carries where they are. Consumer: a request with `do_remote_prefill` whose prompt is the same gets blocks and
waits outside the batch while every rank pulls its shard; then the engine computes the last prompt token and goes on.

How it fails. Every rank reports every pull as ended, and as failed where it failed; the engine waits for all ranks, and
if one failed it computes the whole prompt by itself (or fails the request, by policy). Failures are reported by
request, never as lists of bad blocks, which are not tied to a request: one in the prefix cache would set back every
running request that shares it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from specserve_workers.kv.config import ConnectorSettings, ConnectorSettingsError
from specserve_workers.kv.stats import RequestCounters
from specserve_workers.vllm.connector_messages import StepMetadata, WorkerReport
from specserve_workers.vllm.connector_scheduler import ConnectorScheduler, ConsumerScheduler, ProducerScheduler
from specserve_workers.vllm.connector_worker import ConnectorWorker

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

# Kinds that keep every block of a prompt, in prompt order. Exactly these: sliding windows and local chunks put a null
# block where one fell out of reach, and other kinds derived from full attention keep fewer or more blocks than tokens.
_WHOLE_PROMPT_SPECS: Final = (FullAttentionSpec, MLAAttentionSpec)

# The worker's half of this process, for `kv_stats`.
_workers: Final[list[ConnectorWorker]] = []


def kv_stats() -> dict[str, Any]:
    """Return this rank's KV transfer numbers since the process started; empty without a connector.

    To be called in a worker process. Merge ranks with `specserve_workers.kv.stats.merge_rank_stats`.
    """
    return _workers[-1].stats() if _workers else {}


class SpecserveKvConnector(KVConnectorBase_V1):
    """The border to the engine: passes its calls to the half that lives in this process.

    Raises `ConnectorSettingsError` for settings out of range and for engines whose KV it cannot move.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = ConnectorSettings.from_extra(self._kv_transfer_config.kv_connector_extra_config)
        self._spec = _attention_spec(vllm_config, kv_cache_config)
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler()
        else:
            self._worker = ConnectorWorker(
                self._settings,
                rank=get_tensor_model_parallel_rank(),
                is_producer=self._kv_transfer_config.is_kv_producer,
                is_consumer=self._kv_transfer_config.is_kv_consumer,
            )
            _workers.append(self._worker)

    def _make_scheduler(self) -> ConnectorScheduler:
        counters = RequestCounters()
        shape: Mapping[str, int] = {
            "tensor_parallel_size": self._vllm_config.parallel_config.tensor_parallel_size,
            "block_size_tokens": self._spec.block_size,
        }
        producer = consumer = None
        if self._kv_transfer_config.is_kv_producer:
            producer = ProducerScheduler(self._settings, counters, num_blocks=self._kv_cache_config.num_blocks, **shape)
        if self._kv_transfer_config.is_kv_consumer:
            consumer = ConsumerScheduler(self._settings, counters, **shape)
        return ConnectorScheduler(counters, producer=producer, consumer=consumer)

    # In the scheduler's process.

    @property
    def _in_scheduler(self) -> ConnectorScheduler:
        assert self._scheduler is not None, "a scheduler's method was called in a worker"
        return self._scheduler

    def on_new_request(self, request: "Request") -> None:
        """Check the transfer parameters of a request, once."""
        if self._in_scheduler.consumer is not None:
            self._in_scheduler.consumer.add_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens beyond the cached ones can be loaded; they are loaded between steps."""
        consumer = self._in_scheduler.consumer
        num_tokens = consumer.loadable_tokens(request, num_computed_tokens) if consumer is not None else 0
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Order the load now that the request has blocks."""
        if self._in_scheduler.consumer is not None:
            block_ids = blocks.get_block_ids()[0]
            self._in_scheduler.consumer.blocks_allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return this step's news for the workers."""
        return self._in_scheduler.step_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in the workers' news."""
        self._in_scheduler.update(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Hold the prompt of a request that asked for it."""
        return self._in_scheduler.request_finished(request, block_ids)

    # In each worker's process.

    @property
    def _in_worker(self) -> ConnectorWorker:
        assert self._worker is not None, "a worker's method was called in the scheduler"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the tensors and start to serve."""
        self._in_worker.register(
            kv_caches,
            num_blocks=self._kv_cache_config.num_blocks,
            block_size_tokens=self._spec.block_size,
            instruction_set=_instruction_set(self._vllm_config, self._kv_cache_config, self._spec),
            tensor_parallel_size=self._vllm_config.parallel_config.tensor_parallel_size,
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Act on the scheduler's news.

        Here and not in `start_load_kv`, which the engine calls after the forward: a lease would be unknown, and a
        load would wait, for a whole step.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._in_worker.begin_step(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report what ended in this step."""
        return self._in_worker.end_step(finished_req_ids)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Report why loads failed in this step."""
        return self._in_worker.take_report()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing: loads have started with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request runs before all its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing: blocks are sent from the cache, after the request."""

    def wait_for_save(self) -> None:
        """Nothing is saved during a step."""

    def shutdown(self) -> None:
        """Cut all transfers and end all leases of this process."""
        if self._worker is not None:
            self._worker.close()
            if self._worker in _workers:
                _workers.remove(self._worker)


def _attention_spec(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> AttentionSpec:
    """Return the attention spec of the one group of layers; raise where KV cannot be moved as whole blocks."""
    if vllm_config.parallel_config.pipeline_parallel_size != 1:
        raise ConnectorSettingsError("KV transfer supports no pipeline parallelism: set its size to 1")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConnectorSettingsError(
            f"KV transfer supports models with one kind of attention; this one has {len(groups)} KV cache groups"
        )
    spec = groups[0].kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", None)  # a group of layers that differ in size only
    kinds = list(layers.values()) if layers else [spec]
    for kind in kinds:
        if type(kind) not in _WHOLE_PROMPT_SPECS:
            raise ConnectorSettingsError(
                f"KV transfer supports layers of full attention only, not {type(kind).__name__}: serve this model "
                "without prefill pods"
            )
    first: AttentionSpec = kinds[0]
    return first


def _instruction_set(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: AttentionSpec) -> str:
    """Name how this backend packs a block, so that only equal ones exchange blocks: "amx/LBHNC", "cuda/LBNHC"."""
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        packing = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
    else:
        packing = current_platform.device_type
    return f"{packing}/{kv_cache_config.kv_cache_layout}"
