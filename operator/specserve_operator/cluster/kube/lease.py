"""One active operator among several: the holder of a Lease, by the rules of client-go's leader election.

A candidate takes a Lease that is free, or that has not changed for as long as its holder has promised to renew it,
by the candidate's own clock: clocks of two machines are never compared. A holder that cannot renew stops before anybody
else may take over. Every write names the version that it was decided on.

The client library's own election is not used: in version 37 its lock cannot be created (a parameter of the wrong
type), and a connection that breaks ends it without a word.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from specserve_operator.cluster.kube.client import ApiError, KubeClient
from specserve_operator.cluster.kube.kinds import LEASE
from specserve_operator.cluster.protocol import ClusterError

_LOG = logging.getLogger(__name__)

# client-go's defaults.
LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 15, 10, 2


class LeaseLostError(ClusterError):
    """Somebody else may be active by now: end the process."""


class Lease:
    """One candidate's view of a Lease. `time`: seconds that never run backwards."""

    def __init__(
        self, client: KubeClient, *, namespace: str, name: str, identity: str, time: Callable[[], float]
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._time = time
        self._seen_version = ""
        self._seen_at = 0.0
        self.is_held = False

    @property
    def label(self) -> str:
        return f"lease {self._namespace}/{self._name}"

    async def try_to_hold(self) -> bool:
        """Takes the Lease, or renews it. False while somebody else has it. Raises `ClusterError`."""
        try:
            lease = await self._client.get(LEASE.path(self._namespace, self._name))
        except ApiError as error:
            if error.status != 404:
                raise
            return await self._write("POST", LEASE.path(self._namespace), self._record({}))
        if lease["metadata"]["resourceVersion"] != self._seen_version:
            self._seen_version, self._seen_at = lease["metadata"]["resourceVersion"], self._time()
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity")
        is_over = self._time() >= self._seen_at + spec.get("leaseDurationSeconds", LEASE_SECONDS)
        if holder and holder != self._identity and not is_over:
            return False
        return await self._write("PUT", LEASE.path(self._namespace, self._name), lease | {"spec": self._record(spec)})

    async def release(self) -> None:
        """Lets somebody else take over at once. Raises `ClusterError`."""
        path = LEASE.path(self._namespace, self._name)
        lease = await self._client.get(path)
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") == self._identity:
            # Left out, not empty: the API server refuses an empty holder.
            nobodys = {name: value for name, value in spec.items() if name != "holderIdentity"}
            await self._write("PUT", path, lease | {"spec": nobodys})

    async def _write(self, method: str, path: str, body: dict[str, Any]) -> bool:
        """False if somebody was faster."""
        if method == "POST":
            meta = {"name": self._name, "namespace": self._namespace}
            body = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": body}
        try:
            await self._client.request(method, path, body=body)
        except ApiError as error:
            if error.status != 409:
                raise
            return False
        return True

    def _record(self, before: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_ours = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": before.get("acquireTime", now) if is_ours else now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (not is_ours),
        }


async def run_as_leader(lease: Lease, work: Callable[[], Awaitable[None]], *, time: Callable[[], float]) -> None:
    """Waits for the Lease, runs `work`, and gives the Lease back. Raises `LeaseLostError`; `work` is cancelled then."""
    _LOG.info("waiting for the %s", lease.label)
    asked_at = await _acquire(lease, time)
    lease.is_held = True
    _LOG.info("the %s is ours", lease.label)
    keeper = asyncio.create_task(_keep(lease, time, since=asked_at), name="lease")
    worker = asyncio.ensure_future(work())
    try:
        await asyncio.wait([keeper, worker], return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
        else:
            keeper.result()
    finally:
        for task in (keeper, worker):
            task.cancel()
        await asyncio.wait([keeper, worker])
    try:
        await lease.release()
    except ClusterError as error:
        _LOG.info("the %s was not given back: %s", lease.label, error)


async def _acquire(lease: Lease, time: Callable[[], float]) -> float:
    """Returns when it was asked for: others count from a moment after that, however late the answer comes."""
    while True:
        asked_at = time()
        try:
            if await lease.try_to_hold():
                return asked_at
        except ClusterError as error:
            _LOG.warning("%s: %s", lease.label, error)
        await asyncio.sleep(RETRY_SECONDS)


async def _keep(lease: Lease, time: Callable[[], float], *, since: float) -> None:
    """Renews until it cannot. `since`: when the Lease was asked for. Raises `LeaseLostError`."""
    renewed_at = since
    while True:
        await asyncio.sleep(RETRY_SECONDS)
        asked_at = time()
        try:
            async with asyncio.timeout(max(renewed_at + RENEW_SECONDS - time(), 0)):
                if not await lease.try_to_hold():
                    raise LeaseLostError(f"the {lease.label} was taken by somebody else", retryable=False)
            renewed_at = asked_at
        except LeaseLostError:
            raise
        except (ClusterError, TimeoutError) as error:
            _LOG.warning("%s: not renewed: %s", lease.label, error)
            if time() >= renewed_at + RENEW_SECONDS:
                raise LeaseLostError(f"the {lease.label} was not renewed in time", retryable=False) from error
