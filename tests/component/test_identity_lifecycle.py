"""Everything together and in real time: certificates of seconds, renewed by pods that serve all the while."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from specserve_operator.identity.authority import AuthorityPolicy
from specserve_operator.identity.issuer_keys import IssuerKeys
from specserve_operator.identity.keeper import AuthorityKeeper
from specserve_operator.identity.names import TOKEN_AUDIENCE, PodId
from specserve_operator.identity.operator_tls import OperatorTls
from specserve_operator.identity.service import CallLimits, IdentityServer, IdentityServicer
from specserve_operator.identity.tokens import TokenVerifier
from specserve_workers.identity.names import PodId as WorkerPodId
from specserve_workers.identity.pod import PodTls
from specserve_workers.kv.blocks import KvBlocks
from specserve_workers.kv.client import FetchOrder, KvClient
from specserve_workers.kv.lease import Lease, LeaseTable, new_token
from specserve_workers.kv.server import KvTransferServer, KvTransferServicer, ServerLimits
from specserve_workers.kv.stats import TransferCounters
from tests.unit.identity.builders import DECODE, PREFILL, FakeIssuer, FakeStore
from tests.unit.kv.conftest import NUM_BLOCKS, PROMPT_SHA256, layout_of, make_cache

LIFETIME_SECONDS: Final = 4.0
# An authority signs for two lifetimes, and its successor is trusted for one before it does.
POLICY: Final = AuthorityPolicy(
    certificate_lifetime=timedelta(seconds=LIFETIME_SECONDS),
    ca_lifetime=timedelta(seconds=60),
    rotate_after=timedelta(seconds=2),
    propagation=timedelta(seconds=LIFETIME_SECONDS),
)
LIMITS: Final = ServerLimits(lease_wait_seconds=0.5, chunk_bytes=8192)


def now() -> datetime:
    return datetime.now(UTC)


@asynccontextmanager
async def operator(folder: Path) -> AsyncIterator[tuple[AuthorityKeeper, int]]:
    """Authority and certificate service. The bundle is written where the pods have it mounted."""
    issuer, pods = FakeIssuer(), {pod.uid: pod for pod in (PREFILL, DECODE)}

    def mount() -> None:
        (folder / "ca.pem").write_text(keeper.authority.trust_bundle)

    keeper = AuthorityKeeper(FakeStore(), POLICY, now=now, on_change=mount)
    await keeper.start()
    for pod in pods.values():
        bound = {"namespace": "llm", "pod": {"name": "p", "uid": pod.uid}, "serviceaccount": {"name": "default"}}
        (folder / f"token-{pod.uid}").write_text(issuer.token(now=now(), **{"kubernetes.io": bound}))
    tls = OperatorTls(lambda: keeper.authority, hosts=("localhost",), now=now)
    servicer = IdentityServicer(
        TokenVerifier(IssuerKeys(issuer, time.monotonic), audience=TOKEN_AUDIENCE),
        lambda claims: pods.get(claims.pod_uid),
        authority=lambda: keeper.authority,
        now=now,
        limits=CallLimits(pod_per_second=5.0),
    )
    server = IdentityServer(servicer, tls)
    port = await server.start("127.0.0.1", 0)
    try:
        yield keeper, port
    finally:
        await server.stop(0)


def make_pod(folder: Path, pod: PodId, port: int) -> PodTls:
    return PodTls.of(
        WorkerPodId(pod.namespace, pod.service, pod.pool, pod.uid),
        server=f"localhost:{port}",
        token=folder / f"token-{pod.uid}",
        trust_bundle=folder / "ca.pem",
        directory=folder / pod.uid,
    )


class Traffic:
    """Fetches one prompt after the other, as fast as they go, until it is stopped. Each over a channel of its time."""

    def __init__(self, prefill: PodTls, decode: PodTls) -> None:
        self.blocks = KvBlocks(make_cache(seed=1), num_blocks=NUM_BLOCKS)
        self.leases = LeaseTable(lease_seconds=60)
        servicer = KvTransferServicer(
            blocks=self.blocks,
            layout=layout_of(self.blocks),
            leases=self.leases,
            counters=TransferCounters(),
            limits=LIMITS,
        )
        self.server = KvTransferServer(servicer, host="127.0.0.1", port=0, limits=LIMITS, tls=prefill.prefill_server)
        self.server.start()
        blocks = KvBlocks(make_cache(seed=None), num_blocks=NUM_BLOCKS)
        self.client = KvClient(
            blocks=blocks,
            layout=layout_of(blocks),
            connect_timeout_ms=5000,
            stall_timeout_ms=10_000,
            tls=decode.prefill_channels,
        )
        self.fetched = 0
        self.failures: list[Exception] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(20)
        self.client.close()
        self.leases.close()
        self.server.stop()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            try:
                self.client.fetch(self._order())
            except Exception as error:
                self.failures.append(error)
            else:
                self.fetched += 1

    def _order(self) -> FetchOrder:
        lease = Lease(
            token=new_token(),
            request_id="r",
            block_ids=(5, 6),
            prompt_tokens=60,
            prompt_sha256=PROMPT_SHA256,
            pulls=1,
        )
        self.leases.grant(lease)
        return FetchOrder(
            address=f"127.0.0.1:{self.server.port}",
            lease=lease.token,
            first_block=0,
            block_ids=(0, 1),
            prompt_tokens=60,
            prompt_sha256=PROMPT_SHA256,
        )


async def test_pods_serve_through_renewals_and_a_rotation_without_one_refused_transfer(tmp_path: Path) -> None:
    async with operator(tmp_path) as (keeper, port):
        prefill, decode = make_pod(tmp_path, PREFILL, port), make_pod(tmp_path, DECODE, port)
        for pod in (prefill, decode):
            pod.keeper.start()
            assert await asyncio.to_thread(pod.keeper.wait_for_certificate, 10)
        first_bundle = keeper.authority.trust_bundle
        traffic = Traffic(prefill, decode)
        try:
            # Until nothing is left of what was there at the beginning: key, certificate, authority.
            async with asyncio.timeout(60):
                while any(first_bundle in pod.files.read_trust().decode() for pod in (prefill, decode)):
                    await asyncio.sleep(0.2)
                    await keeper.step()
        finally:
            await asyncio.to_thread(traffic.end)
            prefill.keeper.stop()
            decode.keeper.stop()
    assert traffic.failures == []
    assert traffic.fetched > 20
    assert (prefill.keeper.status.failures, decode.keeper.status.failures) == (0, 0)
    assert min(prefill.keeper.status.renewals, decode.keeper.status.renewals) >= 4
