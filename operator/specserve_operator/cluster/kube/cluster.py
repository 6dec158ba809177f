"""`KubeCluster`: the `Cluster` protocol over a Kubernetes API server.

Reads are answered from the cache; only writes, and a full list from time to time, are requests. The watches are
kopf's (`handlers.py`): they call `observe` and `forget`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve_operator.cluster.kube.cache import ObjectCache, resource_version
from specserve_operator.cluster.kube.client import ApiError, KubeClient
from specserve_operator.cluster.kube.drift import digest_of_owned, owned_values
from specserve_operator.cluster.kube.events import EventRecorder
from specserve_operator.cluster.kube.health import WatchHealth
from specserve_operator.cluster.kube.kinds import SERVICE, WATCHED, Kind, kind_of
from specserve_operator.cluster.kube.repair import overwrite
from specserve_operator.cluster.kube.repairs import RepairLimit
from specserve_operator.cluster.kube.schema import Schema, prune_to
from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.cluster.wakeups import DirtyKeys
from specserve_operator.constants import ANNOTATION_SPEC_HASH, FIELD_MANAGER, MANAGED_BY
from specserve_operator.core.names import LABEL_MANAGED_BY
from specserve_operator.core.objects import Event, Manifest, ObjectRef, ServiceKey
from specserve_operator.core.revision import digest

_LOG = logging.getLogger(__name__)

# Watches that begin anew do so at about the same time: one sweep for them all.
_SETTLE_SECONDS = 1.0
_SWEEP_RETRY_SECONDS = 5.0
# Of a list, before others get their turn.
_TAKEN_AT_ONCE = 50
_NOT_FOUND, _CONFLICT, _INVALID = 404, 409, 422


@dataclass(frozen=True, slots=True)
class _Applied:
    """What was last applied, and what the cluster made of it: values may come back written in another way.

    `version`: of the newest state in which the object still was so.
    """

    rendered: str
    owned: int
    version: int


class KubeCluster:
    """See the module's docstring. `namespaces`: those that are watched; none stands for the whole cluster."""

    def __init__(
        self,
        client: KubeClient,
        recorder: EventRecorder,
        health: WatchHealth,
        *,
        namespaces: Sequence[str] = (),
        kinds: Sequence[Kind] = WATCHED,
        on_apply: Callable[[str, str], None] = lambda kind, outcome: None,
        time: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._health = health
        self._scopes: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self.kinds = tuple(kinds)
        self._on_apply = on_apply
        self.cache = ObjectCache()
        # Resource versions of the last lists, by kind and scope.
        self.listed: dict[tuple[Kind, str | None], int] = {}
        # By kind, where the installed CRDs are older than we: what they know of the statuses.
        self.status_schemas: Mapping[str, Schema] = {}
        self._dirty: DirtyKeys[ServiceKey] = DirtyKeys()
        self._applied: dict[ObjectRef, _Applied] = {}
        self._repairs = RepairLimit(time)

    # What the watches bring

    def observe(self, kind: Kind, obj: Manifest) -> None:
        """A state of an object that a watch or a list has shown."""
        self._wake(self.cache.put(kind, obj))

    def forget(self, kind: Kind, obj: Manifest) -> None:
        """An object that a watch has seen go; `obj` is its last state."""
        self._applied.pop(ObjectRef.of(kind.whole(obj)), None)
        self._wake(self.cache.discard(kind, obj))

    async def sweep(self) -> None:
        """Lists everything and brings the cache in step with it. Raises `ClusterError`.

        A watch that was interrupted for long does not tell of what was deleted meanwhile, so a list must.
        """
        await self._sweep_kinds(self.kinds)

    async def sweep_unwatched(self) -> None:
        """The same for the kinds that have no watch."""
        await self._sweep_kinds([kind for kind in self.kinds if kind.is_optional])

    async def _sweep_kinds(self, kinds: Iterable[Kind]) -> None:
        for kind in kinds:
            for scope in self._scopes:
                self._health.on_listed(kind, scope, await self._sweep(kind, scope))
        self._applied = {ref: applied for ref, applied in self._applied.items() if self.cache.version(ref)}
        self._repairs.prune()

    async def _sweep(self, kind: Kind, scope: str | None) -> int:
        """Returns the newest version of an object in the list."""
        listed: list[ObjectRef] = []
        newest = version = 0
        async for page in self._client.list_all(kind, scope):
            version = page.version
            for number, obj in enumerate(page.objects):
                listed.append(ObjectRef.of(kind.whole(obj)))
                newest = max(newest, resource_version(obj))
                self._wake(self.cache.put(kind, obj))
                if number % _TAKEN_AT_ONCE == _TAKEN_AT_ONCE - 1:
                    await asyncio.sleep(0)
        self._wake(self.cache.keep_only(kind, scope, listed=listed, version=version))
        self.listed[kind, scope] = version
        return newest

    def _wake(self, keys: set[ServiceKey]) -> None:
        for key in keys:
            self._dirty.add(key)

    # The protocol

    async def list_services(self) -> Sequence[ServiceKey]:
        """All SpeculativeServices there are."""
        return self.cache.services()

    async def get_service(self, key: ServiceKey) -> Manifest | None:
        """The service as last seen, `status` included; None if it is gone."""
        return self.cache.get(_service_ref(key))

    async def list_owned(self, key: ServiceKey) -> Sequence[Manifest]:
        """Everything that carries the service's label."""
        return self.cache.owned(key)

    def changes(self, key: ServiceKey) -> int:
        """A number that is another one whenever what the service owns has changed, or it was made anew."""
        return self.cache.changes(key)

    async def apply(self, obj: Manifest, *, field_manager: str = FIELD_MANAGER) -> ApplyOutcome:
        """Server-side apply. No request is sent for what was applied before and is still as it was then."""
        if field_manager != FIELD_MANAGER:
            return await self._seed(obj, field_manager)
        ref, rendered = ObjectRef.of(obj), _content(obj)
        known, version = self._applied.get(ref), self.cache.version(ref)
        if version and known is not None and (known.rendered, known.version) == (rendered, version):
            return ApplyOutcome.UNCHANGED
        live = self.cache.get(ref)
        if live is not None and _is_applied(known, rendered, obj, live):
            self._applied[ref] = _Applied(rendered, digest_of_owned(obj, live), version)
            return ApplyOutcome.UNCHANGED
        if known is not None and known.rendered == rendered and not self._repairs.take(ref):
            raise ClusterError(
                f"{ref.kind} {ref.namespace}/{ref.name} is changed back again and again: does another operator watch "
                "this namespace, or another tool manage what this operator makes?"
            )
        try:
            answer = await self._send(obj, live or await self._find_unlabelled(obj))
        except ClusterError:
            self._on_apply(ref.kind, "refused")
            raise
        self._wake(self.cache.put(kind_of(ref), answer))
        self._applied[ref] = _Applied(rendered, digest_of_owned(obj, answer), resource_version(answer))
        outcome = _outcome(version, resource_version(answer))
        self._on_apply(ref.kind, str(outcome))
        return outcome

    async def _find_unlabelled(self, obj: Manifest) -> Manifest | None:
        """An object that no watch shows. Raises `ClusterError` where it is somebody else's: it would go with ours."""
        ref = ObjectRef.of(obj)
        try:
            found: Manifest = await self._client.get(kind_of(ref).path(ref.namespace, ref.name))
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            return None
        meta = found["metadata"]
        is_labelled = (meta.get("labels") or {}).get(LABEL_MANAGED_BY) == MANAGED_BY
        if is_labelled or _owner_uids(found) & _owner_uids(obj):
            return found
        raise ClusterError(
            f"{ref.kind} {ref.namespace}/{ref.name} is there and does not belong to this service: delete it, or give "
            "the service another name",
            retryable=False,
        )

    async def _send(self, obj: Manifest, live: Manifest | None) -> Manifest:
        kind = kind_of(ObjectRef.of(obj))
        try:
            return await self._client.apply(kind, obj, manager=FIELD_MANAGER)
        except ApiError as error:
            if error.status != _INVALID or live is None:
                raise
            return await overwrite(self._client, kind, obj, manager=FIELD_MANAGER)

    async def _seed(self, obj: Manifest, field_manager: str) -> ApplyOutcome:
        """Takes nothing from anybody: where a field is somebody else's already, that is how it stays."""
        ref = ObjectRef.of(obj)
        before = self.cache.version(ref)
        try:
            answer = await self._client.apply(kind_of(ref), obj, manager=field_manager, force=False)
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            return ApplyOutcome.UNCHANGED
        self._wake(self.cache.put(kind_of(ref), answer))
        return _outcome(before, resource_version(answer))

    async def delete(self, ref: ObjectRef) -> None:
        """Deletes in the background the very object that was seen; one made anew under its name is left alone.

        No request is sent for what is being deleted already. Raises `ClusterError`.
        """
        live = self.cache.get(ref)
        self._applied.pop(ref, None)
        if live is not None and live["metadata"].get("deletionTimestamp"):
            return
        if not self._repairs.allows(ref):
            raise ClusterError(
                f"{ref.kind} {ref.namespace}/{ref.name} is made anew again and again, though nothing needs it any "
                "more: does another tool bring it back?"
            )
        try:
            await self._client.delete(
                kind_of(ref), ref.namespace, ref.name, uid=live["metadata"].get("uid") if live else None
            )
        except ApiError as error:
            if error.status not in (_NOT_FOUND, _CONFLICT):
                raise
            if error.status == _NOT_FOUND and live is not None:
                self._wake(self.cache.discard(kind_of(ref), live))
        else:
            self._repairs.take(ref)

    async def patch_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Replaces the service's whole status. A service that is gone, or was made anew, is no error."""
        await self.patch_child_status(_service_ref(key), status)

    async def patch_child_status(self, ref: ObjectRef, status: Mapping[str, Any]) -> None:
        """Replaces an object's whole status. One that is gone, or was made anew, is no error."""
        live, kind = self.cache.get(ref), kind_of(ref)
        if live is None:
            return
        if kind.name in self.status_schemas:
            status = prune_to(self.status_schemas[kind.name], dict(status))
            if status == live.get("status"):
                return
        # With the uid, an apply cannot create what is gone, nor write over what has the same name by now.
        meta = {"name": ref.name, "namespace": ref.namespace, "uid": live["metadata"]["uid"]}
        body = {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": meta, "status": dict(status)}
        try:
            answer = await self._client.apply(kind, body, manager=FIELD_MANAGER, subresource="status")
        except ApiError as error:
            if error.status not in (_NOT_FOUND, _CONFLICT):
                raise
            return
        keys = self.cache.put(kind, answer)
        if _without_status(answer) != _without_status(live):
            # Somebody else's change came in between, and the watch will show nothing that is newer than this answer.
            self._wake(keys)

    async def emit(self, key: ServiceKey, event: Event) -> None:
        """Records an event about the service. Raises `ClusterError`; nothing if the service is gone."""
        service = self.cache.get(_service_ref(key))
        if service is not None:
            await self._recorder.emit(service, event)

    async def watch(self) -> AsyncIterator[ServiceKey]:
        """Keys of services that changed, or what they own has. For one reader."""
        while True:
            for key in await self._dirty.take():
                yield key


async def keep_in_step(sweep: Callable[[], Awaitable[None]], asked: asyncio.Event, *, period_seconds: float) -> None:
    """Sweeps a moment after `asked` is set, and every `period_seconds`; soon again if that fails. For ever."""
    wait_seconds = period_seconds
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), wait_seconds)
            await asyncio.sleep(_SETTLE_SECONDS)
        asked.clear()
        wait_seconds = period_seconds
        try:
            await sweep()
        except ClusterError as error:
            _LOG.warning("the cluster was not listed: %s", error)
            wait_seconds = min(_SWEEP_RETRY_SECONDS, period_seconds)


def _outcome(before: int, after: int) -> ApplyOutcome:
    """From the resource versions; `before` is 0 for an object that was not known."""
    if not before:
        return ApplyOutcome.CREATED
    return ApplyOutcome.UNCHANGED if after == before else ApplyOutcome.CONFIGURED


def _content(obj: Manifest) -> str:
    """What tells a rendered object from any other: the hash that it carries, or its own."""
    return (obj["metadata"].get("annotations") or {}).get(ANNOTATION_SPEC_HASH) or digest(obj)


def _is_applied(known: _Applied | None, rendered: str, obj: Manifest, live: Manifest) -> bool:
    """True if an apply would change nothing. What an earlier process applied is known by its values alone: among them
    is the hash of all that was rendered then."""
    if known is None:
        return bool(owned_values(obj, live) == obj)
    return (known.rendered, known.owned) == (rendered, digest_of_owned(obj, live))


def _without_status(obj: Manifest) -> Manifest:
    """What of an object is not changed by a write of its status."""
    meta = {k: v for k, v in obj["metadata"].items() if k not in ("managedFields", "resourceVersion")}
    return {k: v for k, v in obj.items() if k != "status"} | {"metadata": meta}


def _owner_uids(obj: Manifest) -> set[str]:
    return {reference["uid"] for reference in obj["metadata"].get("ownerReferences") or ()}


def _service_ref(key: ServiceKey) -> ObjectRef:
    return ObjectRef(SERVICE.api_version, SERVICE.name, key.namespace, key.name)
