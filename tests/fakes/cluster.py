"""A cluster that is only a dict: what the reconciler is tested against. No pods ever run in it."""

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from specserve_operator.cluster.kube.drift import owned_values
from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.constants import FIELD_MANAGER, LABEL_SERVICE
from specserve_operator.core.objects import Event, Manifest, ObjectRef, ServiceKey


class MemoryCluster:
    """Implements `specserve_operator.cluster.protocol.Cluster`, and records what was asked of it.

    `fail_next(method, error)` lets the next call of that method fail.
    """

    def __init__(self) -> None:
        self.services: dict[ServiceKey, Manifest] = {}
        self.objects: dict[ObjectRef, Manifest] = {}
        self.events: list[tuple[ServiceKey, Event]] = []
        self.applied: list[ObjectRef] = []  # objects that an apply has changed
        self._rendered: dict[ObjectRef, Manifest] = {}
        self.deleted: list[ObjectRef] = []
        self.refused_kinds: set[str] = set()
        self.status_writes = 0
        self._made: dict[ServiceKey, int] = {}
        self._failures: dict[str, list[Exception]] = {}
        self._changed: asyncio.Queue[ServiceKey] = asyncio.Queue()
        self._asked = 0

    def put(self, service: Manifest) -> ServiceKey:
        """Stores a service as a user's `apply` does. A changed spec is a new generation.

        After `remove` the uid is another.
        """
        meta = service["metadata"]
        key = ServiceKey(meta.get("namespace", "default"), meta["name"])
        old = self.services.get(key)
        generation = 1 if old is None else old["metadata"]["generation"] + (old["spec"] != service["spec"])
        self._made[key] = self._made.get(key, 0) + (old is None)
        uid = f"uid-{key.name}-{self._made[key]}"
        stored = copy.deepcopy(service)
        stored["metadata"] |= {"namespace": key.namespace, "generation": generation, "uid": uid}
        stored["status"] = {} if old is None else old["status"]
        self.services[key] = stored
        self._changed.put_nowait(key)
        return key

    def remove(self, key: ServiceKey) -> None:
        """Deletes a service and, as garbage collection would, what it owns."""
        del self.services[key]
        self.objects = {ref: obj for ref, obj in self.objects.items() if not _belongs_to(obj, key)}
        self._changed.put_nowait(key)

    def add_pod(self, name: str, key: ServiceKey, *, labels: Mapping[str, str], ready: bool = True) -> Manifest:
        """A pod that carries the service's labels and, by default, is ready at 127.0.0.1."""
        pod: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": key.namespace,
                "uid": f"uid-{name}",
                "labels": {LABEL_SERVICE: key.name, "app.kubernetes.io/managed-by": "specserve", **labels},
            },
            "spec": {"containers": [{"name": "engine"}]},
            "status": {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": str(ready)}],
                "containerStatuses": [{"name": "engine", "ready": ready, "restartCount": 0, "state": {"running": {}}}],
            },
        }
        self.objects[ObjectRef.of(pod)] = pod
        self._changed.put_nowait(key)
        return pod

    def fail_next(self, method: str, error: Exception | None = None) -> None:
        self._failures.setdefault(method, []).append(error or ClusterError(f"{method} failed"))

    async def list_services(self) -> Sequence[ServiceKey]:
        self._maybe_fail("list_services")
        return list(self.services)

    async def get_service(self, key: ServiceKey) -> Manifest | None:
        self._maybe_fail("get_service")
        return copy.deepcopy(self.services.get(key))

    async def list_owned(self, key: ServiceKey) -> Sequence[Manifest]:
        self._maybe_fail("list_owned")
        return [copy.deepcopy(obj) for obj in self.objects.values() if _belongs_to(obj, key)]

    def changes(self, key: ServiceKey) -> int:
        """Another number each time: tests change the objects behind our back."""
        self._asked += 1
        return self._asked

    async def apply(self, obj: Manifest, *, field_manager: str = FIELD_MANAGER) -> ApplyOutcome:
        ref = ObjectRef.of(obj)
        old = self.objects.get(ref)
        if old is not None and self._rendered.get(ref, obj) == obj and owned_values(obj, old) == obj:
            return ApplyOutcome.UNCHANGED  # without a request
        self._maybe_fail("apply")
        if ref.kind in self.refused_kinds:
            raise ClusterError(f"{ref.kind} refused", retryable=False)
        self.applied.append(ref)
        self.objects[ref], self._rendered[ref] = copy.deepcopy(obj), copy.deepcopy(obj)
        return ApplyOutcome.CREATED if old is None else ApplyOutcome.CONFIGURED

    async def delete(self, ref: ObjectRef) -> None:
        self._maybe_fail("delete")
        self.deleted.append(ref)
        self.objects.pop(ref, None)

    async def patch_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        self._maybe_fail("patch_status")
        self.status_writes += 1
        if key in self.services:
            self.services[key]["status"] = copy.deepcopy(dict(status))

    async def patch_child_status(self, ref: ObjectRef, status: Mapping[str, Any]) -> None:
        self._maybe_fail("patch_child_status")
        if ref in self.objects:
            self.objects[ref]["status"] = copy.deepcopy(dict(status))

    async def emit(self, key: ServiceKey, event: Event) -> None:
        self._maybe_fail("emit")
        self.events.append((key, event))

    async def watch(self) -> AsyncIterator[ServiceKey]:
        while True:
            yield await self._changed.get()

    def _maybe_fail(self, method: str) -> None:
        if errors := self._failures.get(method):
            raise errors.pop(0)


def _belongs_to(obj: Manifest, key: ServiceKey) -> bool:
    meta = obj["metadata"]
    is_same_namespace = meta.get("namespace", "default") == key.namespace
    return is_same_namespace and (meta.get("labels") or {}).get(LABEL_SERVICE) == key.name
