"""What the reconciler needs of a cluster. Two implementations: Kubernetes, and processes on this machine."""

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from specserve_operator.core.objects import Event, Manifest, ObjectRef, ServiceKey


class ApplyOutcome(StrEnum):
    CREATED = "created"
    CONFIGURED = "configured"
    UNCHANGED = "unchanged"


class Cluster(Protocol):
    """All I/O of the control plane. Methods are safe to repeat; errors are `ClusterError`."""

    async def list_services(self) -> Sequence[ServiceKey]:
        """All SpeculativeServices there are."""
        ...

    async def get_service(self, key: ServiceKey) -> Manifest | None:
        """The service as stored, `status` included; None if it is gone."""
        ...

    async def list_owned(self, key: ServiceKey) -> Sequence[Manifest]:
        """Deployments, Services, ConfigMaps, ... and Pods that carry the service's label, in no order."""
        ...

    async def apply(self, obj: Manifest) -> ApplyOutcome:
        """Server-side apply as field manager `specserve`: creates, or makes our fields so. Others' fields stay."""
        ...

    async def delete(self, ref: ObjectRef) -> None:
        """Deletes in the background (pods end gracefully). An object that is not there is no error."""
        ...

    async def patch_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Replaces the service's whole status. A service that is gone is no error."""
        ...

    async def emit(self, key: ServiceKey, event: Event) -> None:
        """Records an event about the service; the same reason again within a while raises its count."""
        ...

    def watch(self) -> AsyncIterator[ServiceKey]:
        """Keys whose service or owned objects changed, each at least once after every change. Never ends."""
        ...


class ClusterError(Exception):
    """The cluster refused or could not be reached; the message is for the user, `retryable` for the reconciler."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable
