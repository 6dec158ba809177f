"""Small values that every layer speaks of: which object, which service, which event."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# A Kubernetes object as it travels on the wire. Typed where it is read (core.snapshot), opaque where it is moved.
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class ServiceKey:
    """Namespace and name of one SpeculativeService: the unit of work of the reconciler."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class ObjectRef:
    """Names one object of any kind."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, obj: Manifest) -> "ObjectRef":
        """The reference to `obj`, which must have apiVersion, kind and metadata.name."""
        meta = obj["metadata"]
        return cls(obj["apiVersion"], obj["kind"], meta.get("namespace", "default"), meta["name"])


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """An object that the cluster refused or could not take, and why."""

    ref: ObjectRef
    message: str


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a service. `reason` is part of the API (api/conditions.py)."""

    type: EventType
    reason: str
    message: str
