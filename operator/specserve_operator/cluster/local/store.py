"""All objects of the local cluster: what an API server does with objects of any kind.

Stored objects are never changed in place: each change stores a new dict, so readers may keep what they were given but
must not write to it. Everything here is synchronous and belongs to one event loop; listeners are called within the
change and may only take notes.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.core.objects import Manifest

_SERVER_METADATA = frozenset(
    {
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
    }
)
_DEFAULT_GRACE_SECONDS = 30


class ObjectKey(NamedTuple):
    """Names an object. The group is left out: no two kinds here share a name."""

    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, obj: Manifest) -> "ObjectKey":
        meta = obj["metadata"]
        return cls(obj["kind"], meta.get("namespace", "default"), meta["name"])


class ChangeType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Change:
    """`obj` is the object after the change; of a deletion, its last state with a new resourceVersion."""

    type: ChangeType
    obj: Manifest


Listener = Callable[[Change], None]


class Persistence(Protocol):
    """Where objects are kept over a restart."""

    def write_object(self, obj: Manifest) -> None: ...
    def remove_object(self, obj: Manifest) -> None: ...


def timestamp(now: datetime | None = None) -> str:
    """A time as Kubernetes writes it, in UTC and whole seconds; by default the present."""
    return (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def matches(selector: Mapping[str, str], obj: Manifest) -> bool:
    """True if `obj` carries every label of `selector`."""
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in selector.items())


def is_being_deleted(obj: Manifest) -> bool:
    return "deletionTimestamp" in obj["metadata"]


class ObjectStore:
    """Objects by key, with versions, owners and listeners."""

    def __init__(self, persistence: Persistence | None = None, *, objects: Iterable[Manifest] = ()) -> None:
        """`objects`: what an earlier store had persisted."""
        self._persistence = persistence
        self._objects: dict[ObjectKey, Manifest] = {ObjectKey.of(obj): obj for obj in objects}
        self._listeners: list[Listener] = []
        self._version = max((int(obj["metadata"]["resourceVersion"]) for obj in self._objects.values()), default=0)

    @property
    def resource_version(self) -> str:
        """The version of the newest change."""
        return str(self._version)

    def get(self, key: ObjectKey) -> Manifest | None:
        return self._objects.get(key)

    def list(
        self, kind: str, namespace: str | None = None, *, selector: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """Objects of a kind, of one namespace if given, that carry all labels of `selector`; by namespace and name."""
        found = [
            obj
            for key, obj in self._objects.items()
            if key.kind == kind and namespace in (None, key.namespace) and matches(selector or {}, obj)
        ]
        return sorted(found, key=ObjectKey.of)

    def __iter__(self) -> Iterator[Manifest]:
        return iter(list(self._objects.values()))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` at every change from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def apply(self, obj: Manifest) -> ApplyOutcome:
        """Makes the object so: everything but `status` and the server's metadata is replaced.

        That is server-side apply with one manager, which owns all fields outside `status`. Only a `spec` that is left
        out whole is somebody else's, and stays. Raises `ClusterError` for an object without apiVersion, kind or name.
        """
        desired = _without_server_fields(obj)
        key = ObjectKey.of(desired)
        current = self._objects.get(key)
        if current is None:
            self._create(key, desired)
            return ApplyOutcome.CREATED
        server = {k: v for k, v in current["metadata"].items() if k in _SERVER_METADATA}
        merged = {**desired, "metadata": {**desired["metadata"], **server}}
        for part in {"spec", "status"} & current.keys():
            merged.setdefault(part, current[part])
        if merged == current:
            return ApplyOutcome.UNCHANGED
        if merged.get("spec") != current.get("spec"):
            merged["metadata"]["generation"] = server.get("generation", 0) + 1
        self._put(key, merged, ChangeType.MODIFIED)
        return ApplyOutcome.CONFIGURED

    def _create(self, key: ObjectKey, desired: Manifest) -> None:
        desired["metadata"].update(uid=str(uuid.uuid4()), creationTimestamp=timestamp())
        if "spec" in desired:
            desired["metadata"]["generation"] = 1
        self._put(key, desired, ChangeType.ADDED)
        if self._is_orphan(desired):
            self.delete(key)  # its owner went while it was on its way

    def patch_status(self, key: ObjectKey, status: Mapping[str, Any]) -> bool:
        """Replaces the status, which is no new generation. False if nothing changed or the object is gone."""
        current = self._objects.get(key)
        if current is None or current.get("status", {}) == status:
            return False
        updated = {**current, "metadata": dict(current["metadata"]), "status": deepcopy(dict(status))}
        self._put(key, updated, ChangeType.MODIFIED)
        return True

    def delete(self, key: ObjectKey) -> bool:
        """Deletes in the background. A pod is only marked: who runs it removes it. False if there is no such object."""
        current = self._objects.get(key)
        if current is None:
            return False
        if key.kind != "Pod":
            self.remove(key)
            return True
        if not is_being_deleted(current):
            grace = current.get("spec", {}).get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)
            meta = {
                **current["metadata"],
                "deletionTimestamp": timestamp(),
                "deletionGracePeriodSeconds": grace,
            }
            self._put(key, {**current, "metadata": meta}, ChangeType.MODIFIED)
        return True

    def remove(self, key: ObjectKey) -> None:
        """Takes the object out, and everything only it owned."""
        current = self._objects.pop(key, None)
        if current is None:
            return
        if self._persistence is not None:
            self._persistence.remove_object(current)
        self._version += 1
        meta = {**current["metadata"], "resourceVersion": str(self._version)}
        self._notify(Change(ChangeType.DELETED, {**current, "metadata": meta}))
        for child_key, child in list(self._objects.items()):
            if self._is_orphan(child):
                self.delete(child_key)

    def _is_orphan(self, obj: Manifest) -> bool:
        """True if `obj` names owners and none of them is left."""
        owners = obj["metadata"].get("ownerReferences") or []
        namespace = obj["metadata"]["namespace"]
        return bool(owners) and not any(self._is_there(owner, namespace) for owner in owners)

    def _is_there(self, owner: Mapping[str, Any], namespace: str) -> bool:
        found = self._objects.get(ObjectKey(owner["kind"], namespace, owner["name"]))
        return found is not None and found["metadata"]["uid"] == owner["uid"]

    def _put(self, key: ObjectKey, obj: Manifest, change: ChangeType) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = obj
        if self._persistence is not None:
            self._persistence.write_object(obj)
        self._notify(Change(change, obj))

    def _notify(self, change: Change) -> None:
        for listener in list(self._listeners):
            listener(change)


def _without_server_fields(obj: Manifest) -> Manifest:
    """A copy of `obj` with what a client may set, and its namespace filled in."""
    try:
        _ = obj["apiVersion"], obj["kind"], obj["metadata"]["name"]
    except (KeyError, TypeError) as error:
        message = f"object without {error.args[0] if error.args else 'metadata'}"
        raise ClusterError(message, retryable=False) from error
    desired = deepcopy({key: value for key, value in obj.items() if key != "status"})
    desired["metadata"] = {k: v for k, v in desired["metadata"].items() if k not in _SERVER_METADATA}
    desired["metadata"].setdefault("namespace", "default")
    return desired
