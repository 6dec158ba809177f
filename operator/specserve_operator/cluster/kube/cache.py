"""What the operator knows of the cluster: the newest state of every watched object that it has seen.

Three sources fill it: watches, the answers to our own writes, and from time to time a full list. An older state never
replaces a newer one, so it does not matter in which order they arrive; and a reader sees what it has just written.

Objects are kept as compressed JSON: as Python values they would take thirty times the memory, and few are ever looked
at.
"""

import json
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from specserve_operator.cluster.kube.kinds import SERVICE, Kind
from specserve_operator.constants import LABEL_SERVICE
from specserve_operator.core.objects import Manifest, ObjectRef, ServiceKey

# Deletions that a late answer could undo. An answer is never that late.
_TOMBSTONES = 4096


def resource_version(obj: Manifest) -> int:
    """Versions are compared as numbers, which Kubernetes guarantees for objects of one kind; 0 if it is none."""
    text = obj["metadata"].get("resourceVersion", "")
    return int(text) if text.isdigit() else 0


def service_of(kind: Kind, obj: Manifest) -> ServiceKey | None:
    """The service that an object is, or belongs to by its label."""
    meta = obj["metadata"]
    name = meta["name"] if kind is SERVICE else (meta.get("labels") or {}).get(LABEL_SERVICE)
    return None if name is None else ServiceKey(meta["namespace"], name)


# Kind (API version and name) and namespace.
_Place = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Entry:
    """`uid`: of a service, else empty."""

    version: int
    service: ServiceKey | None
    packed: bytes
    uid: str

    def load(self) -> Manifest:
        obj: Manifest = json.loads(zlib.decompress(self.packed))
        return obj


@dataclass(slots=True)
class _Family:
    """A service's objects. `changes`: as in `ObjectCache.changes`."""

    refs: dict[ObjectRef, None] = field(default_factory=dict)
    changes: int = 0


class ObjectCache:
    """Objects by reference and by service. Synchronous: each method is one step for the event loop."""

    def __init__(self) -> None:
        self._entries: dict[ObjectRef, _Entry] = {}
        self._places: dict[_Place, dict[ObjectRef, None]] = {}
        self._families: dict[ServiceKey, _Family] = {}
        self._tombstones: OrderedDict[ObjectRef, int] = OrderedDict()
        self._changes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, kind: Kind, obj: Manifest) -> set[ServiceKey]:
        """Takes in a state of an object. Returns the services that it changed something for."""
        obj = kind.whole(obj)
        ref, version = ObjectRef.of(obj), resource_version(obj)
        known = self._entries.get(ref)
        if version and version <= max(known.version if known else 0, self._tombstones.get(ref, 0)):
            return set()
        text = json.dumps(kind.slim(obj), separators=(",", ":")).encode()
        uid = obj["metadata"].get("uid", "") if kind is SERVICE else ""
        entry = _Entry(version, service_of(kind, obj), zlib.compress(text, level=1), uid)
        self._entries[ref] = entry
        self._places.setdefault(_place(ref), {})[ref] = None
        return self._note(ref, known, entry)

    def discard(self, kind: Kind, obj: Manifest) -> set[ServiceKey]:
        """Takes in that an object is gone; `obj` is its last state. Returns the services that it belonged to."""
        ref, version = ObjectRef.of(kind.whole(obj)), resource_version(obj)
        known = self._entries.get(ref)
        self._bury(ref, version)
        if known is None or (version and known.version > version):
            return set()  # never seen, or made anew since
        return self._remove(ref, known)

    def keep_only(
        self, kind: Kind, namespace: str | None, listed: Iterable[ObjectRef], version: int
    ) -> set[ServiceKey]:
        """Drops the objects of `kind` that a list of `version` did not have. Returns the services they belonged to."""
        present, changed = set(listed), set[ServiceKey]()
        for ref in self.refs(kind, namespace):
            known = self._entries[ref]
            if ref not in present and (not version or known.version <= version):
                self._bury(ref, known.version)
                changed |= self._remove(ref, known)
        return changed

    def refs(self, kind: Kind, namespace: str | None = None) -> list[ObjectRef]:
        """All objects of a kind, in one namespace or in all."""
        if namespace is not None:
            return list(self._places.get((kind.api_version, kind.name, namespace), ()))
        places = [refs for place, refs in self._places.items() if place[:2] == (kind.api_version, kind.name)]
        return [ref for refs in places for ref in refs]

    def get(self, ref: ObjectRef) -> Manifest | None:
        """A copy of the newest known state."""
        entry = self._entries.get(ref)
        return None if entry is None else entry.load()

    def version(self, ref: ObjectRef) -> int:
        """Resource version of the newest known state; 0 if there is none."""
        entry = self._entries.get(ref)
        return 0 if entry is None else entry.version

    def owned(self, key: ServiceKey) -> list[Manifest]:
        """Copies of all objects that carry the service's label."""
        return [self._entries[ref].load() for ref in self._family_refs(key) if ref.kind != SERVICE.name]

    def services(self) -> list[ServiceKey]:
        return [ServiceKey(ref.namespace, ref.name) for ref in self.refs(SERVICE)]

    def changes(self, key: ServiceKey) -> int:
        """A number that is another one whenever what the service owns has changed, or it was made anew.

        0 for an unknown one. Its own spec and status do not count: the status is written every few seconds.
        """
        family = self._families.get(key)
        return 0 if family is None else family.changes

    def _family_refs(self, key: ServiceKey) -> Iterator[ObjectRef]:
        return iter(self._families[key].refs if key in self._families else ())

    def _note(self, ref: ObjectRef, before: _Entry | None, now: _Entry | None) -> set[ServiceKey]:
        """Keeps families in step with a change of one object; its label may have changed too."""
        old, new = before.service if before else None, now.service if now else None
        touched = {key for key in (old, new) if key is not None}
        if before and now and ref.kind == SERVICE.name and before.uid == now.uid:
            return touched
        self._changes += 1
        if old is not None and old != new:
            family = self._families[old]
            family.refs.pop(ref, None)
            family.changes = self._changes
            if not family.refs:
                del self._families[old]
        if new is not None:
            family = self._families.setdefault(new, _Family())
            family.refs[ref] = None
            family.changes = self._changes
        return touched

    def _remove(self, ref: ObjectRef, known: _Entry) -> set[ServiceKey]:
        del self._entries[ref]
        place = _place(ref)
        del self._places[place][ref]
        if not self._places[place]:
            del self._places[place]
        return self._note(ref, known, None)

    def _bury(self, ref: ObjectRef, version: int) -> None:
        self._tombstones[ref] = max(version, self._tombstones.pop(ref, 0))
        while len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)


def _place(ref: ObjectRef) -> _Place:
    return ref.api_version, ref.kind, ref.namespace
