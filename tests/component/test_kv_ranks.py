"""Two tensor-parallel ranks move one request's KV: it arrives if both shards do, and fails as a whole if one does not.

Real servers, clients and tensors, and the engine's own aggregation of what ranks report; no engine.
"""

import socket
import time
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specserve_workers.kv.config import ConnectorSettings
from specserve_workers.kv.stats import RequestCounters, merge_rank_stats

NUM_BLOCKS, BLOCK_TOKENS, RANKS = 12, 32, 2
SHAPE = {"tensor_parallel_size": RANKS, "block_size_tokens": BLOCK_TOKENS}


@pytest.fixture(scope="module")
def vllm() -> Any:
    """The engine's modules, which take seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's own, at import
        pytest.importorskip("vllm")
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        from specserve_workers.vllm import connector_scheduler, connector_worker

    return SimpleNamespace(
        aggregator=KVOutputAggregator,
        output=KVConnectorOutput,
        runner_output=ModelRunnerOutput,
        status=RequestStatus,
        scheduler=connector_scheduler,
        worker=connector_worker,
    )


def two_free_ports() -> int:
    """A port that is free together with the next one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


class Pod:
    """The connector of one engine: its scheduler's half and one worker's half for each rank."""

    def __init__(self, vllm: Any, *, port: int, is_producer: bool, seed: int | None) -> None:
        settings = ConnectorSettings(
            host="127.0.0.1",
            port=port,
            lease_seconds=30,
            connect_timeout_ms=3000,
            stall_timeout_ms=3000,
            target_revision="rev",
        )
        counters = RequestCounters()
        producer = vllm.scheduler.ProducerScheduler(settings, counters, num_blocks=NUM_BLOCKS, **SHAPE)
        consumer = vllm.scheduler.ConsumerScheduler(settings, counters, **SHAPE)
        self._vllm = vllm
        self.scheduler = vllm.scheduler.ConnectorScheduler(
            counters, producer=producer if is_producer else None, consumer=None if is_producer else consumer
        )
        self.caches = [self._cache(rank, seed) for rank in range(RANKS)]
        self.workers = []
        for rank, cache in enumerate(self.caches):
            worker = vllm.worker.ConnectorWorker(
                settings, rank=rank, is_producer=is_producer, is_consumer=not is_producer
            )
            worker.register(cache, num_blocks=NUM_BLOCKS, instruction_set="vec/LBHNC", **SHAPE)
            self.workers.append(worker)
        self._aggregator = vllm.aggregator(RANKS)

    @staticmethod
    def _cache(rank: int, seed: int | None) -> dict[str, torch.Tensor]:
        names = ("model.layers.0.attn", "model.layers.1.attn", "draft_model.layers.0.attn")
        if seed is None:
            return {name: torch.zeros(NUM_BLOCKS, 1, BLOCK_TOKENS, 16) for name in names}
        generator = torch.Generator().manual_seed(seed + rank)
        return {name: torch.randn(NUM_BLOCKS, 1, BLOCK_TOKENS, 16, generator=generator) for name in names}

    def step(self) -> Any:
        """One engine step without tokens: news to all ranks, their reports aggregated, the scheduler told."""
        metadata = self.scheduler.step_metadata(SimpleNamespace(total_num_scheduled_tokens=0))
        outputs = []
        for worker in self.workers:
            worker.begin_step(metadata)
        for worker in self.workers:
            results = worker.end_step(set())
            report = self._vllm.output(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=worker.take_report(),
            )
            outputs.append(self._vllm.runner_output.with_kv_conn_output_only(report))
        output = self._aggregator.aggregate(outputs).kv_connector_output
        self.scheduler.update(output)
        return output

    def step_until(self, name: str) -> Any:
        """Step until a request is reported in this set of the aggregated output; return the output."""
        deadline = time.monotonic() + 20
        while not getattr(output := self.step(), name):
            assert time.monotonic() < deadline, f"nothing in {name}"
        return output

    def stats(self) -> dict[str, Any]:
        self.step()
        return merge_rank_stats([worker.stats() for worker in self.workers])


@pytest.fixture
def pods(vllm: Any) -> Iterator[tuple[Pod, Pod]]:
    port = two_free_ports()
    pair = (
        Pod(vllm, port=port, is_producer=True, seed=5),
        Pod(vllm, port=port, is_producer=False, seed=None),
    )
    yield pair
    for pod in pair:
        for worker in pod.workers:
            worker.close()


def make_request(request_id: str, *, params: dict[str, Any] | None, status: Any = None, tokens: int = 70) -> Any:
    """The part of an engine's request that the connector looks at."""
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=params,
        status=status,
        prompt_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        prompt_embeds=None,
        mm_features=[],
        lora_request=None,
    )


def hold(vllm: Any, producer: Pod, block_ids: list[int], **params: Any) -> dict[str, Any]:
    wish = {"do_remote_decode": True, **params}
    request = make_request("p", params=wish, status=vllm.status.FINISHED_LENGTH_CAPPED)
    is_held, source = producer.scheduler.request_finished(request, block_ids)
    assert is_held
    producer.step()
    return source


def start_load(consumer: Pod, source: dict[str, Any], block_ids: list[int], *, cached_tokens: int = 0) -> Any:
    request = make_request("d", params=source)
    side = consumer.scheduler.consumer
    side.add_request(request)
    num_tokens = side.loadable_tokens(request, cached_tokens)
    side.blocks_allocated(request, block_ids, num_tokens)
    return request


def test_both_shards_arrive_each_from_its_rank(vllm: Any, pods: tuple[Pod, Pod]) -> None:
    producer, consumer = pods
    start_load(consumer, hold(vllm, producer, [7, 3, 9]), [1, 2, 0])
    output = consumer.step_until("finished_recving")
    assert (output.finished_recving, output.failed_recving) == ({"d"}, set())
    for source, target in zip(producer.caches, consumer.caches, strict=True):
        for name in source:
            expected = torch.zeros(3, 1, 32, 16) if name.startswith("draft_model.") else source[name][[7, 3, 9]]
            assert torch.equal(target[name][[1, 2, 0]], expected)
    assert producer.step_until("finished_sending").finished_sending == {"p"}
    stats = consumer.stats()
    assert (stats["remote_prefills"], stats["loaded_tokens"], stats["fallbacks"]) == (1, 69, {})
    assert stats["loaded_bytes"] == RANKS * 2 * 3 * 32 * 16 * 4


def test_request_fails_as_a_whole_if_one_shard_does_not_arrive(vllm: Any, pods: tuple[Pod, Pod]) -> None:
    producer, consumer = pods
    source = hold(vllm, producer, [7, 3, 9])
    producer.workers[1].close()
    start_load(consumer, source, [1, 2, 0])
    output = consumer.step_until("finished_recving")
    assert (output.finished_recving, output.failed_recving) == ({"d"}, {"d"})
    stats = consumer.stats()
    assert (stats["remote_prefills"], stats["loaded_tokens"], sum(stats["fallbacks"].values())) == (0, 0, 1)
    assert stats["fallbacks"] == {"connect": 1}


def test_blocks_of_the_local_prefix_cache_are_neither_asked_for_nor_written(vllm: Any, pods: tuple[Pod, Pod]) -> None:
    producer, consumer = pods
    start_load(consumer, hold(vllm, producer, [7, 3, 9]), [1, 2, 0], cached_tokens=32)
    consumer.step_until("finished_recving")
    for source, target in zip(producer.caches, consumer.caches, strict=True):
        assert not target["model.layers.1.attn"][1].any()
        assert torch.equal(target["model.layers.1.attn"][[2, 0]], source["model.layers.1.attn"][[3, 9]])
    assert consumer.stats()["loaded_tokens"] == 37


def test_wholly_cached_prompt_gives_its_lease_up(vllm: Any, pods: tuple[Pod, Pod]) -> None:
    producer, consumer = pods
    source = hold(vllm, producer, [7, 3, 9], pulls=2)
    for _ in range(2):
        start_load(consumer, source, [1, 2, 0], cached_tokens=69)
    consumer.step()
    assert producer.step_until("finished_sending").finished_sending == {"p"}
    assert consumer.stats()["fallbacks"] == {}


def test_request_that_ends_before_it_has_blocks_gives_its_lease_up(vllm: Any, pods: tuple[Pod, Pod]) -> None:
    producer, consumer = pods
    request = make_request("d", params=hold(vllm, producer, [7, 3, 9]))
    consumer.scheduler.consumer.add_request(request)
    consumer.scheduler.request_finished(request, [])
    consumer.step()
    assert producer.step_until("finished_sending").finished_sending == {"p"}


def test_budget_counts_all_blocks_that_stay_held_with_the_prompt(vllm: Any, pods: tuple[Pod, Pod]) -> None:
    producer, _ = pods
    request = make_request("long", params={"do_remote_decode": True}, status=vllm.status.FINISHED_LENGTH_CAPPED)
    # Half of the cache is 6 blocks; the prompt takes 3, what was generated behind it the rest.
    assert producer.scheduler.request_finished(request, [0, 1, 2, 3, 4, 5, 6]) == (False, None)
    is_held, source = producer.scheduler.request_finished(request, [0, 1, 2, 3, 4, 5])
    assert is_held
    assert source["num_blocks"] == 3
    short = make_request("short", params={"do_remote_decode": True}, status=vllm.status.FINISHED_LENGTH_CAPPED)
    assert producer.scheduler.request_finished(short, [7, 8, 9]) == (False, None)


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_only_whole_prompts_are_held(vllm: Any, pods: tuple[Pod, Pod], status: str) -> None:
    request = make_request("p", params={"do_remote_decode": True}, status=getattr(vllm.status, status))
    assert pods[0].scheduler.request_finished(request, [7, 3, 9]) == (False, None)


@pytest.mark.parametrize(
    "change",
    [{"prompt_embeds": object()}, {"mm_features": [1]}, {"lora_request": object()}, {"prompt_token_ids": None}],
)
def test_prompts_that_token_ids_do_not_determine_are_never_transferred(
    vllm: Any, pods: tuple[Pod, Pod], change: dict[str, Any]
) -> None:
    producer, consumer = pods
    request = make_request("p", params={"do_remote_decode": True}, status=vllm.status.FINISHED_STOPPED)
    request.__dict__.update(change)
    assert producer.scheduler.request_finished(request, [7, 3, 9]) == (False, None)
    wanted = make_request("d", params=hold(vllm, producer, [7, 3, 9]))
    wanted.__dict__.update(change)
    consumer.scheduler.consumer.add_request(wanted)
    assert consumer.scheduler.consumer.loadable_tokens(wanted, 0) == 0
    assert consumer.stats()["fallbacks"] == {"unsupported": 1}
