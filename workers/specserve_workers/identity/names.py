"""What certificates say. Pure.

The operator writes them, in the spelling of docs/contracts.md ("Identity").
"""

import re
from dataclasses import dataclass
from typing import Final, Self

OPERATOR_ID: Final = "spiffe://specserve.dev/operator"

_LABEL: Final = r"[A-Za-z0-9._-]+"
_POD_ID: Final = re.compile(
    rf"spiffe://specserve\.dev/ns/(?P<namespace>{_LABEL})/service/(?P<service>{_LABEL})"
    rf"/pool/(?P<pool>{_LABEL})/pod/(?P<uid>{_LABEL})"
)


@dataclass(frozen=True, slots=True)
class PodId:
    """A pod of a service."""

    namespace: str
    service: str
    pool: str
    uid: str

    @classmethod
    def parse(cls, uri: str) -> Self | None:
        """The pod that a SPIFFE id names; None if it names something else."""
        match = _POD_ID.fullmatch(uri)
        return None if match is None else cls(**match.groupdict())

    @property
    def uri(self) -> str:
        """The SPIFFE id."""
        return f"spiffe://specserve.dev/ns/{self.namespace}/service/{self.service}/pool/{self.pool}/pod/{self.uid}"


@dataclass(frozen=True, slots=True)
class ServiceId:
    """The service that a pod belongs to: the only one whose pods it has to do with."""

    namespace: str
    service: str

    def host(self, pool: str) -> str:
        """The name that the certificate of every pod of a pool has. Nothing resolves it."""
        return f"{pool}.{self.service}.{self.namespace}.pool.specserve.internal"

    def has_pod(self, uri: str, *, pool: str) -> bool:
        """Whether a SPIFFE id is that of a pod of this service and that pool."""
        pod = PodId.parse(uri)
        return pod is not None and (pod.namespace, pod.service, pod.pool) == (self.namespace, self.service, pool)
