"""`LocalCluster`: the parts of this package wired together behind the `Cluster` protocol."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from specserve_operator.cluster.local import addresses, leftovers, podapi
from specserve_operator.cluster.local.addresses import PodAddresses
from specserve_operator.cluster.local.deployments import DeploymentController
from specserve_operator.cluster.local.events import EventRecorder
from specserve_operator.cluster.local.kubelet import Kubelet, Node
from specserve_operator.cluster.local.network import ServiceNetwork
from specserve_operator.cluster.local.options import LocalOptions
from specserve_operator.cluster.local.podaccess import PodAccess
from specserve_operator.cluster.local.podapi import PodApi
from specserve_operator.cluster.local.statedir import StateDir, StateDirLock
from specserve_operator.cluster.local.store import Change, ObjectKey, ObjectStore
from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.cluster.wakeups import DirtyKeys
from specserve_operator.constants import FIELD_MANAGER, LABEL_SERVICE
from specserve_operator.core.objects import Event, Manifest, ObjectRef, ServiceKey

_SERVICE_KIND = "SpeculativeService"
_GONE_POLL_SECONDS = 0.05


def _service_object(key: ServiceKey) -> ObjectKey:
    return ObjectKey(_SERVICE_KIND, key.namespace, key.name)


def _service_of(obj: Manifest) -> ServiceKey | None:
    """The service that an object is, or belongs to by its label."""
    meta = obj["metadata"]
    name = meta["name"] if obj["kind"] == _SERVICE_KIND else (meta.get("labels") or {}).get(LABEL_SERVICE)
    return None if name is None else ServiceKey(meta["namespace"], name)


class LocalCluster:
    """See the package's docstring. One event loop, one user; an async context manager."""

    def __init__(self, state_dir: Path, options: LocalOptions | None = None) -> None:
        self.state = StateDir(state_dir)
        self._options = options or LocalOptions()
        self._stack = AsyncExitStack()
        self._store = ObjectStore()

    async def __aenter__(self) -> Self:
        """Takes the state directory, cleans up after a killed control plane, and starts. Raises `ClusterError`."""
        async with AsyncExitStack() as stack:
            stack.callback(StateDirLock.acquire(self.state).release)
            await asyncio.to_thread(self._clean_up)
            kept = list(self.state.read_all()) if self._options.resume else []
            self._store = store = ObjectStore(self.state, objects=kept)
            self._events = EventRecorder(store)
            await self._start(stack, store)
            self._stack = stack.pop_all()
        return self

    def _clean_up(self) -> None:
        """Ends processes that an earlier control plane left, and removes its pods; blocks."""
        pods = self.state.list_objects("Pod")
        note_paths = list(self.state.pods.glob("*/*/run/*.json"))
        notes = [note for path in note_paths if (note := leftovers.read_pid_note(path)) is not None]
        leftovers.kill_pods([pod["metadata"]["uid"] for pod in pods], notes)
        if not self._options.resume:
            self.state.clear()
            return
        for path in note_paths:
            path.unlink(missing_ok=True)
        for pod in pods:
            self.state.remove_object(pod)

    async def _start(self, stack: AsyncExitStack, store: ObjectStore) -> None:
        """Starts everything; it ends in the opposite order, so pods have their surroundings to the last."""
        access, api_address = await self._start_pod_api(stack, store)
        http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))
        await stack.enter_async_context(http)
        self._network = ServiceNetwork(store, self.state, self._events, listen_host=self._options.listen_host)
        stack.push_async_callback(self._network.close)
        self._run(stack, "services", self._network.run())
        node = Node(
            store=store,
            state=self.state,
            events=self._events,
            addresses=PodAddresses(api_address),
            access=access,
            options=self._options,
            http=http,
        )
        self._kubelet = Kubelet(node)
        stack.push_async_callback(self._kubelet.stop)
        self._run(stack, "deployments", DeploymentController(store, self._events).run())

    async def _start_pod_api(self, stack: AsyncExitStack, store: ObjectStore) -> tuple[PodAccess, str]:
        """Listens in the first block of addresses that no other control plane has."""
        failure: OSError | None = None
        for address in addresses.api_addresses():
            access = PodAccess(store, f"http://{address}:{podapi.PORT}")
            api = PodApi(store, access)
            try:
                await api.start(address)
            except OSError as error:
                failure = error
                await api.stop()
                continue
            stack.push_async_callback(api.stop)
            return access, address
        raise ClusterError(f"no block of pod addresses is free: {failure}", retryable=False)

    def _run(self, stack: AsyncExitStack, name: str, work: Any) -> None:
        task = asyncio.create_task(work, name=name)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        stack.push_async_callback(end)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all pods, then everything else. Objects stay in the state directory, to be read."""
        await self._stack.aclose()

    def kill_pods(self) -> None:
        """Takes all patience out of leaving the cluster: pods are killed, whatever their grace period."""
        self._kubelet.hasten()

    # The protocol

    async def list_services(self) -> Sequence[ServiceKey]:
        """All SpeculativeServices there are."""
        metas = (obj["metadata"] for obj in self._store.list(_SERVICE_KIND))
        return [ServiceKey(meta["namespace"], meta["name"]) for meta in metas]

    async def get_service(self, key: ServiceKey) -> Manifest | None:
        """The service as stored, `status` included; None if it is gone."""
        return deepcopy(self._store.get(_service_object(key)))

    async def list_owned(self, key: ServiceKey) -> Sequence[Manifest]:
        """Everything that carries the service's label."""
        return [
            deepcopy(obj)
            for obj in self._store
            if obj["kind"] != _SERVICE_KIND and obj["kind"] != "Event" and _service_of(obj) == key
        ]

    def changes(self, key: ServiceKey) -> int:
        """A number that is another one after anything has changed."""
        return int(self._store.resource_version)

    async def apply(self, obj: Manifest, *, field_manager: str = FIELD_MANAGER) -> ApplyOutcome:
        """Creates the object or makes it so. Raises `ClusterError`, also for a Service whose port can't be had.

        Fields have no recorded managers here: another manager than ours only creates.
        """
        if obj.get("kind") == "Service" and "metadata" in obj:
            await self._network.reserve_ports(obj)
        if field_manager != FIELD_MANAGER and self._store.get(ObjectKey.of(obj)) is not None:
            return ApplyOutcome.UNCHANGED
        return self._store.apply(obj)

    async def delete(self, ref: ObjectRef) -> None:
        """Deletes in the background, with all that the object owns."""
        self._store.delete(ObjectKey(ref.kind, ref.namespace, ref.name))

    async def patch_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Replaces the service's whole status."""
        self._store.patch_status(_service_object(key), status)

    async def patch_child_status(self, ref: ObjectRef, status: Mapping[str, Any]) -> None:
        """Replaces the whole status of an object."""
        self._store.patch_status(ObjectKey(ref.kind, ref.namespace, ref.name), status)

    async def emit(self, key: ServiceKey, event: Event) -> None:
        """Records an event about the service; said again, its count goes up. Nothing if the service is gone."""
        service = self._store.get(_service_object(key))
        if service is not None:
            self._events.emit(service, event)

    def watch(self) -> AsyncIterator[ServiceKey]:
        """Keys of services that changed, or what they own has; first all there are. Listens from this call on."""
        dirty: DirtyKeys[ServiceKey] = DirtyKeys()

        def on_change(change: Change) -> None:
            if change.obj["kind"] != "Event" and (key := _service_of(change.obj)) is not None:
                dirty.add(key)

        for obj in self._store.list(_SERVICE_KIND):
            dirty.add(ServiceKey(obj["metadata"]["namespace"], obj["metadata"]["name"]))
        unsubscribe = self._store.subscribe(on_change)

        async def keys() -> AsyncIterator[ServiceKey]:
            try:
                while True:
                    for key in await dirty.take():
                        yield key
            finally:
                unsubscribe()

        return keys()

    # What an API server and kubectl give on Kubernetes

    async def put_service(self, manifest: Manifest) -> ApplyOutcome:
        """Creates or changes a SpeculativeService, whose manifest is valid. A changed spec is a new generation."""
        if manifest.get("kind") != _SERVICE_KIND:
            raise ClusterError(f"kind {manifest.get('kind')} is not {_SERVICE_KIND}", retryable=False)
        return self._store.apply(manifest)

    async def scale_pool(self, namespace: str, scaler: str, replicas: int) -> ApplyOutcome:
        """Writes the number of a PoolScaler, as an autoscaler or `kubectl scale` does. Raises `ClusterError`."""
        found = self._store.get(ObjectKey("PoolScaler", namespace, scaler))
        if found is None:
            raise ClusterError(f"there is no PoolScaler {scaler} yet: try again in a moment")
        return self._store.apply({**found, "spec": {**found.get("spec", {}), "replicas": replicas}})

    async def delete_service(self, key: ServiceKey) -> bool:
        """Deletes a service and, in the background, all that it owns. False if there is no such service."""
        return self._store.delete(_service_object(key))

    async def wait_gone(self, key: ServiceKey, *, timeout_seconds: float) -> bool:
        """Waits until neither the service nor anything it owned is left. False if the time is up first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while self._store.get(_service_object(key)) is not None or await self.list_owned(key):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_GONE_POLL_SECONDS)
        return True

    def list_objects(self, kind: str, namespace: str | None = None) -> list[Manifest]:
        """Objects of a kind, by namespace and name."""
        return deepcopy(self._store.list(kind, namespace))

    def get_object(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object; None if it is not there."""
        return deepcopy(self._store.get(ObjectKey(kind, namespace, name)))

    def endpoint_of(self, namespace: str, service: str) -> str | None:
        """The URL of a ClusterIP Service on this machine; None if there is none that listens."""
        return self._network.endpoint_of(namespace, service)

    def read_log(
        self,
        namespace: str,
        pod: str,
        *,
        container: str | None = None,
        previous: bool = False,
        tail_lines: int | None = None,
    ) -> str:
        """The log of a container. Raises `LogNotFound`."""
        return self.state.read_log(namespace, pod, container=container, previous=previous, tail_lines=tail_lines)

    def follow_log(
        self, namespace: str, pod: str, *, container: str | None = None, tail_lines: int | None = None
    ) -> AsyncIterator[str]:
        """The log so far and what is added to it. Raises `LogNotFound`."""
        return self.state.follow_log(namespace, pod, container=container, tail_lines=tail_lines)
