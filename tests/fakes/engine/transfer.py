"""KV transfer of a fake engine: both halves of the real connector, called as the engine calls them."""

import argparse
import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from specserve_workers.kv.config import ConnectorSettings
from specserve_workers.kv.stats import RequestCounters
from specserve_workers.vllm.connector_scheduler import ConnectorScheduler, ConsumerScheduler, ProducerScheduler
from specserve_workers.vllm.connector_worker import ConnectorWorker
from tests.fakes.engine.blocks import LAYERS, KvBlocks, Layer, layer_content, prompt_blocks
from tests.fakes.engine.stand_ins import ConnectorOutput, RequestStatus

logger = logging.getLogger("vllm.fake")

# How often the halves are asked for news: while blocks are on their way here, and while some are held for others.
_PULL_STEP_SECONDS: Final = 0.004
_HOLD_STEP_SECONDS: Final = 0.05


class WrongBlocksError(RuntimeError):
    """Blocks that arrived are not those of the prompt: a fault of the transfer that only a comparison can show."""


class LoadFailedError(RuntimeError):
    """A prompt's KV did not come, and the pod is not to compute it itself."""


@dataclass(slots=True)
class EngineRequest:
    """One sequence as the connector sees it, under the engine's own names."""

    request_id: str
    prompt_token_ids: Sequence[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    status: RequestStatus = RequestStatus.RUNNING
    prompt_embeds: None = None
    mm_features: tuple[()] = ()
    lora_request: None = None
    block_ids: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class KvTransfer:
    """The connector of one engine with all its ranks.

    `free` is called with the blocks of a request that was held or loading once nobody reads or writes them any more.
    """

    def __init__(
        self, args: argparse.Namespace, *, num_blocks: int, block_bytes: int, free: Callable[[Iterable[int]], None]
    ) -> None:
        config = args.kv_transfer_config
        settings = ConnectorSettings.from_extra(config["kv_connector_extra_config"])
        shape = {"tensor_parallel_size": args.tensor_parallel_size, "block_size_tokens": args.block_size}
        counters = RequestCounters()
        is_producer = config["kv_role"] == "kv_producer"
        self.fails_requests: bool = config["kv_load_failure_policy"] == "fail"
        self._scheduler = ConnectorScheduler(
            counters,
            producer=ProducerScheduler(settings, counters, num_blocks=num_blocks, **shape) if is_producer else None,
            consumer=None if is_producer else ConsumerScheduler(settings, counters, **shape),
        )
        self._block_size_tokens, self._block_bytes, self._free = args.block_size, block_bytes, free
        self._workers = [
            ConnectorWorker(settings, rank=rank, is_producer=is_producer, is_consumer=not is_producer)
            for rank in range(args.tensor_parallel_size)
        ]
        self._caches = []
        for worker in self._workers:
            tensors: Any = {name: Layer(block_bytes) for name in LAYERS}
            worker.register(tensors, num_blocks=num_blocks, instruction_set="fake", **shape)
            self._caches.append(KvBlocks(tensors, num_blocks=num_blocks))
        self._loads: dict[str, asyncio.Future[bool]] = {}
        self._keeping: dict[str, list[int]] = {}
        self._unreported: dict[tuple[str, str], int] = {}
        self._aborted: set[str] = set()
        self._failed: set[str] = set()
        self._wake = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    def rank_stats(self) -> list[dict[str, Any]]:
        return [worker.stats() for worker in self._workers]

    def close(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
        for worker in self._workers:
            worker.close()

    def write_prompt(self, request: EngineRequest) -> None:
        """Fills the prompt's blocks, as its computation does."""
        digests = prompt_blocks(request.prompt_token_ids, block_size_tokens=self._block_size_tokens)
        for index in range(len(LAYERS)):
            content = layer_content(digests, layer_index=index, block_bytes=self._block_bytes)
            for cache in self._caches:
                cache.scatter(index, request.block_ids[: len(digests)], content)

    async def load(self, request: EngineRequest) -> bool:
        """Pulls a prompt's blocks into the request's; False where there is nothing to pull or it did not come.

        Raises:
            LoadFailedError: it did not come, and the pod was started with `--kv-on-failure Fail`.
            WrongBlocksError: blocks of another prompt came.
        """
        consumer = self._scheduler.consumer
        if consumer is None:
            return False
        consumer.add_request(request)
        num_tokens = consumer.loadable_tokens(request, 0)
        consumer.blocks_allocated(request, request.block_ids, num_tokens)
        self._drive()
        if num_tokens == 0:
            return False
        done = self._loads[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            is_loaded: bool = await done
        except asyncio.CancelledError:
            if request.request_id in self._loads:
                # The pull may still write: the blocks stay with it until it has ended.
                self._aborted.add(request.request_id)
                self._keeping[request.request_id] = request.block_ids
                request.block_ids = []
            raise
        finally:
            consumer.request_finished(request)
            self._drive()
        if not is_loaded and self.fails_requests:
            raise LoadFailedError(f"request {request.request_id}: its KV cache was not loaded")
        if is_loaded:
            self._check(request, num_tokens)
        return is_loaded

    def finish(self, request: EngineRequest) -> dict[str, Any] | None:
        """Holds a finished request's prompt if it is wanted elsewhere; the parameters that say where it is."""
        is_held: bool
        params: dict[str, Any] | None
        is_held, params = self._scheduler.request_finished(request, request.block_ids)
        if is_held:
            self._keeping[request.request_id] = request.block_ids
            request.block_ids = []
        self._drive()
        return params

    def _check(self, request: EngineRequest, num_tokens: int) -> None:
        digests = prompt_blocks(request.prompt_token_ids, block_size_tokens=self._block_size_tokens)
        count = -(-num_tokens // self._block_size_tokens)
        for index, name in enumerate(LAYERS):
            expected = layer_content(digests[:count], layer_index=index, block_bytes=self._block_bytes)
            if any(cache.gather(index, request.block_ids[:count]) != expected for cache in self._caches):
                raise WrongBlocksError(f"request {request.request_id}: the blocks of {name} are not its own")

    def _drive(self) -> None:
        self._wake.set()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Steps as long as blocks are on their way or held, and whenever there is news."""
        while True:
            self._wake.clear()
            self._step()
            seconds = _PULL_STEP_SECONDS if self._loads or self._aborted else _HOLD_STEP_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds if self._loads or self._keeping else None):
                    await self._wake.wait()

    def _step(self) -> None:
        """One step of the engine, as far as the connector is concerned."""
        metadata = self._scheduler.step_metadata(SimpleNamespace(total_num_scheduled_tokens=1))
        output = ConnectorOutput()
        for worker in self._workers:
            worker.begin_step(metadata)
        for worker in self._workers:
            self._take_results(worker, output)
        output.failed_recving = self._failed & output.finished_recving
        self._failed -= output.failed_recving
        self._scheduler.update(output)
        for request_id in output.finished_recving:
            self._aborted.discard(request_id)
            done = self._loads.pop(request_id, None)
            if done is not None and not done.done():
                done.set_result(request_id not in output.failed_recving)
        for request_id in output.finished_sending | output.finished_recving:
            if block_ids := self._keeping.pop(request_id, None):
                self._free(block_ids)

    def _take_results(self, worker: ConnectorWorker, output: ConnectorOutput) -> None:
        """Adds what one rank reports. A request has ended once every rank says so, and failed if one does."""
        results = worker.end_step(self._aborted)
        output.finished_sending |= self._on_all_ranks("sending", results.finished_sending)
        output.finished_recving |= self._on_all_ranks("recving", results.finished_recving)
        self._failed |= results.failed_recving
        report = worker.take_report()
        if report is not None:
            earlier = output.kv_connector_worker_meta
            output.kv_connector_worker_meta = report if earlier is None else earlier.aggregate(report)

    def _on_all_ranks(self, kind: str, request_ids: set[str]) -> set[str]:
        """Those that the last rank has reported with this."""
        complete = set()
        for request_id in request_ids:
            left = self._unreported.pop((kind, request_id), len(self._workers)) - 1
            if left:
                self._unreported[kind, request_id] = left
            else:
                complete.add(request_id)
        return complete
