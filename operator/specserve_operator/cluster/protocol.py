"""What the reconciler needs of a cluster. Two implementations: Kubernetes, and processes on this machine."""

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from specserve_operator.constants import FIELD_MANAGER
from specserve_operator.core.objects import Event, Manifest, ObjectRef, ServiceKey

# For fields that get a first value from us and are somebody else's from then on.
SEED_FIELD_MANAGER = f"{FIELD_MANAGER}-seed"


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

    def changes(self, key: ServiceKey) -> int:
        """A number that is another one after what the service owns has changed, or it was made anew.

        It may be another one without.
        """
        ...

    async def apply(self, obj: Manifest, *, field_manager: str = FIELD_MANAGER) -> ApplyOutcome:
        """Server-side apply: creates, or makes our fields so. Others' fields stay.

        As `specserve` it takes fields that are set otherwise from whoever set them. As any other manager it takes
        nothing: where a field is somebody else's, nothing is done, which is no error.
        """
        ...

    async def delete(self, ref: ObjectRef) -> None:
        """Deletes in the background (pods end gracefully). An object that is not there is no error."""
        ...

    async def patch_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Replaces the service's whole status. A service that is gone is no error."""
        ...

    async def patch_child_status(self, ref: ObjectRef, status: Mapping[str, Any]) -> None:
        """Replaces the whole status of a child, e.g. a PoolScaler. One that is gone is no error."""
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
