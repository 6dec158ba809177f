"""Events as Kubernetes has them: one object for the same thing said again, with a count; old ones are dropped."""

import hashlib
from typing import Any

from specserve_operator.cluster.local.store import ObjectKey, ObjectStore, timestamp
from specserve_operator.core.objects import Event, EventType, Manifest

_KEPT_EVENTS = 500


class EventRecorder:
    """Writes events into the store."""

    def __init__(self, store: ObjectStore, *, kept: int = _KEPT_EVENTS) -> None:
        self._store = store
        self._kept = kept

    def emit(self, about: Manifest, event: Event) -> None:
        """Records `event` about an object. Same object, type, reason and message: the count goes up."""
        meta = about["metadata"]
        text = "\0".join([meta["uid"], event.type, event.reason, event.message])
        name = f"{meta['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        known = self._store.get(ObjectKey("Event", meta["namespace"], name))
        now = timestamp()
        self._store.apply(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": meta["namespace"]},
                "involvedObject": _reference(about),
                "type": str(event.type),
                "reason": event.reason,
                "message": event.message,
                "count": known["count"] + 1 if known else 1,
                "firstTimestamp": known["firstTimestamp"] if known else now,
                "lastTimestamp": now,
                "source": {"component": "specserve"},
            }
        )
        if known is None:
            self._drop_oldest()

    def normal(self, about: Manifest, reason: str, message: str) -> None:
        self.emit(about, Event(EventType.NORMAL, reason, message))

    def warning(self, about: Manifest, reason: str, message: str) -> None:
        self.emit(about, Event(EventType.WARNING, reason, message))

    def _drop_oldest(self) -> None:
        events = self._store.list("Event")
        events.sort(key=lambda obj: int(obj["metadata"]["resourceVersion"]))
        for obj in events[: -self._kept]:
            self._store.remove(ObjectKey.of(obj))


def _reference(obj: Manifest) -> dict[str, Any]:
    meta = obj["metadata"]
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "namespace": meta["namespace"],
        "name": meta["name"],
        "uid": meta["uid"],
    }
