"""A producer and a consumer over real gRPC on the loopback interface, with real tensors."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import grpc
import pytest
import torch

from specserve_workers.kv.blocks import KvBlocks
from specserve_workers.kv.client import FetchOrder, KvClient
from specserve_workers.kv.layout import KvLayout
from specserve_workers.kv.lease import Lease, LeaseTable, new_token
from specserve_workers.kv.server import KvTransferServer, KvTransferServicer, ServerLimits
from specserve_workers.kv.stats import TransferCounters

NUM_BLOCKS = 24
PROMPT_SHA256 = hashlib.sha256(b"prompt").digest()


def make_cache(*, seed: int | None) -> dict[str, torch.Tensor]:
    """Three layers of two sizes, [blocks, heads, tokens, width]; zeros without a seed."""
    shapes = {
        "layer.0": (NUM_BLOCKS, 2, 32, 64),
        "layer.1": (NUM_BLOCKS, 2, 32, 64),
        "layer.2": (NUM_BLOCKS, 1, 32, 64),
    }
    if seed is None:
        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def layout_of(blocks: KvBlocks) -> KvLayout:
    return KvLayout(
        revision="rev",
        dtype="bfloat16",
        block_size_tokens=32,
        instruction_set="vec/LBHNC",
        tensor_parallel_size=1,
        layers=blocks.layouts,
    )


@dataclass
class Producer:
    """Its cache, its leases, and its server on `address`."""

    cache: dict[str, torch.Tensor]
    blocks: KvBlocks
    layout: KvLayout
    leases: LeaseTable
    counters: TransferCounters
    server: KvTransferServer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def hold(self, block_ids: tuple[int, ...] = (5, 6, 2, 9), *, pulls: int = 1, request_id: str = "r") -> Lease:
        lease = Lease(
            token=new_token(),
            request_id=request_id,
            block_ids=block_ids,
            prompt_tokens=len(block_ids) * 32 - 3,
            prompt_sha256=PROMPT_SHA256,
            pulls=pulls,
        )
        self.leases.grant(lease)
        return lease


@pytest.fixture
def make_producer() -> Iterator[Callable[..., Producer]]:
    made: list[Producer] = []

    def make(*, limits: ServerLimits | None = None, lease_seconds: float = 60.0, port: int = 0) -> Producer:
        # Few bytes in a chunk: several chunks for each layer, the last one smaller.
        limits = limits or ServerLimits(lease_wait_seconds=0.2, chunk_bytes=3 * 8192)
        cache = make_cache(seed=1)
        blocks = KvBlocks(cache, num_blocks=NUM_BLOCKS)
        layout, leases, counters = layout_of(blocks), LeaseTable(lease_seconds=lease_seconds), TransferCounters()
        servicer = KvTransferServicer(blocks=blocks, layout=layout, leases=leases, counters=counters, limits=limits)
        server = KvTransferServer(servicer, host="127.0.0.1", port=port, limits=limits)
        server.start()
        made.append(Producer(cache, blocks, layout, leases, counters, server))
        return made[-1]

    yield make
    for producer in made:
        producer.leases.close()
        producer.server.stop()


@pytest.fixture
def producer(make_producer: Callable[..., Producer]) -> Producer:
    return make_producer()


@dataclass
class Consumer:
    """Its cache, all zeros at first, and its client."""

    cache: dict[str, torch.Tensor]
    client: KvClient

    def is_untouched(self) -> bool:
        return not any(tensor.any() for tensor in self.cache.values())


@pytest.fixture
def make_consumer() -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(*, connect_timeout_ms: int = 5000, stall_timeout_ms: int = 10_000, **layout_changes: object) -> Consumer:
        cache = make_cache(seed=None)
        blocks = KvBlocks(cache, num_blocks=NUM_BLOCKS)
        client = KvClient(
            blocks=blocks,
            layout=replace(layout_of(blocks), **layout_changes),
            connect_timeout_ms=connect_timeout_ms,
            stall_timeout_ms=stall_timeout_ms,
        )
        made.append(Consumer(cache, client))
        return made[-1]

    yield make
    for consumer in made:
        consumer.client.close()


@pytest.fixture
def consumer(make_consumer: Callable[..., Consumer]) -> Consumer:
    return make_consumer()


@pytest.fixture
def order_for() -> Callable[..., FetchOrder]:
    def order(
        producer: Producer, lease: Lease, block_ids: tuple[int, ...] = (0, 1, 2, 3), *, first_block: int = 0
    ) -> FetchOrder:
        return FetchOrder(
            address=producer.address,
            lease=lease.token,
            first_block=first_block,
            block_ids=block_ids,
            prompt_tokens=lease.prompt_tokens,
            prompt_sha256=PROMPT_SHA256,
        )

    return order


@pytest.fixture
def serve() -> Iterator[Callable[[object], str]]:
    """Start a gRPC server for a servicer that misbehaves, and return its address."""
    from concurrent import futures

    from specserve_protos.v1alpha1 import kv_transfer_pb2_grpc as pb_grpc

    servers: list[grpc.Server] = []

    def start(servicer: object) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait(5)
