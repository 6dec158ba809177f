"""The scheduler's half of the KV connector: which prompts are held, which are loaded, and what became of them.

It runs in the engine's main process and does no I/O; it is called from the scheduler's thread only.
"""

import logging
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from specserve_workers.kv.config import ConnectorSettings
from specserve_workers.kv.errors import BadParamsError, TransferCause
from specserve_workers.kv.lease import Lease, LeaseBudget, new_token
from specserve_workers.kv.params import RemoteDecode, RemotePrefill, prompt_sha256
from specserve_workers.kv.stats import RequestCounters
from specserve_workers.vllm.connector_messages import PullOrder, StepMetadata, WorkerReport

logger = logging.getLogger(__name__)

# A prompt is whole once its request stopped by itself. Aborted, failed and ignored requests hold nothing.
_WHOLE_PROMPT = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class ProducerScheduler:
    """Holds finished prompts for decode pods.

    Args:
        tensor_parallel_size: of this engine; consumers with another one are refused by the layout check.
        num_blocks: blocks of the KV cache.
        block_size_tokens: tokens in a block.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        counters: RequestCounters,
        *,
        tensor_parallel_size: int,
        num_blocks: int,
        block_size_tokens: int,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._tensor_parallel_size = tensor_parallel_size
        self._block_size_tokens = block_size_tokens
        self._budget = LeaseBudget(max_leases=settings.max_leases, max_blocks=int(num_blocks * settings.max_held_ratio))
        self._grants: list[Lease] = []

    def request_finished(self, request: Request, block_ids: list[int]) -> RemotePrefill | None:
        """Hold the prompt of a finished request that asked for it; None where its blocks may be freed.

        A full budget is no error: the answer then has no parameters, and the decode pod prefills by itself.
        """
        try:
            wish = RemoteDecode.from_params(request.kv_transfer_params)
        except BadParamsError as error:
            logger.warning("request %s is not held: %s", request.request_id, error)
            return None
        if wish is None or request.status not in _WHOLE_PROMPT or not is_plain_prompt(request):
            return None
        num_blocks = -(-request.num_prompt_tokens // self._block_size_tokens)
        if not 0 < num_blocks <= len(block_ids):
            return None
        # The engine keeps all blocks of the request, those behind the prompt too.
        if not self._budget.try_hold(request.request_id, len(block_ids)):
            self._counters.refused_leases += 1
            return None
        lease = Lease(
            token=new_token(),
            request_id=request.request_id,
            block_ids=tuple(block_ids[:num_blocks]),
            prompt_tokens=request.num_prompt_tokens,
            prompt_sha256=prompt_sha256(request.prompt_token_ids),
            pulls=wish.pulls,
        )
        self._grants.append(lease)
        return RemotePrefill(
            lease=lease.token,
            host=self._settings.host,
            port=self._settings.port,
            tensor_parallel_size=self._tensor_parallel_size,
            revision=self._settings.target_revision,
            prompt_tokens=lease.prompt_tokens,
            prompt_sha256=lease.prompt_sha256,
            num_blocks=num_blocks,
        )

    def take_grants(self) -> tuple[Lease, ...]:
        """Return the leases made since the last call."""
        grants, self._grants = tuple(self._grants), []
        return grants

    def update(self, output: KVConnectorOutput) -> None:
        """Note which requests all ranks have let go."""
        for request_id in output.finished_sending or ():
            self._budget.free(request_id)


class ConsumerScheduler:
    """Decides for each new request whether its prompt KV is loaded, and counts what became of it.

    A request is in at most one of two states: planned (accepted, no blocks yet) or loading.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        counters: RequestCounters,
        *,
        tensor_parallel_size: int,
        block_size_tokens: int,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._tensor_parallel_size = tensor_parallel_size
        self._block_size_tokens = block_size_tokens
        self._planned: dict[str, RemotePrefill] = {}
        self._loading_tokens: dict[str, int] = {}
        self._causes: dict[str, TransferCause] = {}
        self._pulls: list[PullOrder] = []
        self._releases: list[RemotePrefill] = []

    def add_request(self, request: Request) -> None:
        """Check a new request's parameters once. One that does not pass is prefilled here, and counted."""
        try:
            source = RemotePrefill.from_params(request.kv_transfer_params)
        except BadParamsError as error:
            logger.warning("request %s is prefilled here: %s", request.request_id, error)
            self._counters.count_fallback(TransferCause.BAD_PARAMS)
            return
        if source is None:
            return
        refusal = self._refusal(request, source)
        if refusal is None:
            self._planned[request.request_id] = source
            return
        logger.warning("request %s is prefilled here: %s", request.request_id, refusal.value)
        self._counters.count_fallback(refusal)
        self._releases.append(source)

    def loadable_tokens(self, request: Request, num_cached_tokens: int) -> int:
        """Tokens to load beyond those in the local prefix cache; no side effects.

        The last prompt token is never among them: the engine computes it anyway, to sample the next one.
        """
        if request.request_id not in self._planned:
            return 0
        return max(0, request.num_prompt_tokens - 1 - num_cached_tokens)

    def blocks_allocated(self, request: Request, block_ids: list[int], num_loaded_tokens: int) -> None:
        """Order the pull of a planned request, or give its lease up where there is nothing to load."""
        source = self._planned.pop(request.request_id, None)
        if source is None:
            return
        if num_loaded_tokens == 0:
            self._releases.append(source)
            return
        size = self._block_size_tokens
        end_tokens = request.num_prompt_tokens - 1
        first_block = (end_tokens - num_loaded_tokens) // size
        end_block = -(-end_tokens // size)
        self._pulls.append(
            PullOrder(
                request_id=request.request_id,
                source=source,
                first_block=first_block,
                block_ids=tuple(block_ids[first_block:end_block]),
            )
        )
        self._loading_tokens[request.request_id] = num_loaded_tokens

    def request_finished(self, request: Request) -> None:
        """Forget a request that ended. If it never got to load, its lease is given up."""
        source = self._planned.pop(request.request_id, None)
        if source is not None:
            self._releases.append(source)
        self._loading_tokens.pop(request.request_id, None)

    def take_orders(self) -> tuple[tuple[PullOrder, ...], tuple[RemotePrefill, ...]]:
        """Return pulls and releases ordered since the last call."""
        orders = tuple(self._pulls), tuple(self._releases)
        self._pulls, self._releases = [], []
        return orders

    def update(self, output: KVConnectorOutput) -> None:
        """Count the loads that ended on all ranks."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._causes |= report.causes
        for request_id in output.finished_recving or ():
            cause = self._causes.pop(request_id, None)
            num_tokens = self._loading_tokens.pop(request_id, None)
            if num_tokens is None:
                continue  # aborted meanwhile: neither loaded nor prefilled here
            if request_id in output.failed_recving:
                self._counters.count_fallback(cause or TransferCause.INTERNAL)
            else:
                self._counters.count_loaded(num_tokens)

    def _refusal(self, request: Request, source: RemotePrefill) -> TransferCause | None:
        if not is_plain_prompt(request):
            return TransferCause.UNSUPPORTED
        if (source.revision, source.tensor_parallel_size) != (
            self._settings.target_revision,
            self._tensor_parallel_size,
        ):
            return TransferCause.LAYOUT_MISMATCH
        if source.num_blocks != -(-source.prompt_tokens // self._block_size_tokens):
            return TransferCause.LAYOUT_MISMATCH
        if source.prompt_tokens != request.num_prompt_tokens or source.prompt_sha256 != prompt_sha256(
            request.prompt_token_ids
        ):
            return TransferCause.PROMPT_MISMATCH
        return None


class ConnectorScheduler:
    """Both roles as the connector needs them: an engine is a producer, a consumer, or (in tests) both."""

    def __init__(
        self,
        counters: RequestCounters,
        *,
        producer: ProducerScheduler | None,
        consumer: ConsumerScheduler | None,
    ) -> None:
        self._counters = counters
        self.producer = producer
        self.consumer = consumer
        self._sent_counters: dict[str, Any] = {}

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks stay held, and the parameters for the answer."""
        if self.consumer is not None:
            self.consumer.request_finished(request)
        held = self.producer.request_finished(request, block_ids) if self.producer is not None else None
        return (False, None) if held is None else (True, held.to_params())

    def step_metadata(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return and clear what the workers have to know for this step."""
        pulls, releases = self.consumer.take_orders() if self.consumer is not None else ((), ())
        counters = self._counters.to_dict()
        has_news = counters != self._sent_counters
        self._sent_counters = counters
        return StepMetadata(
            grants=self.producer.take_grants() if self.producer is not None else (),
            pulls=pulls,
            releases=releases,
            is_idle=scheduler_output.total_num_scheduled_tokens == 0,
            request_counters=counters if has_news else None,
        )

    def update(self, output: KVConnectorOutput) -> None:
        """Take in what all ranks report after a step."""
        if self.producer is not None:
            self.producer.update(output)
        if self.consumer is not None:
            self.consumer.update(output)


def is_plain_prompt(request: Request) -> bool:
    """Whether the prompt's KV follows from its token ids alone, so that equal ids mean equal KV."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and request.lora_request is None
    )
