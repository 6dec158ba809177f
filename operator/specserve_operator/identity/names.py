"""What certificates say, and where a pod finds what it needs to get one. Pure.

A pod's certificate has one SPIFFE URI, which servers judge a client by, and two host names, which clients check of a
server: gRPC and TLS libraries compare names by themselves, and addresses of pods come and go. Nothing resolves the
host names; `internal` is a domain that nobody can own. Workers have the same names in `specserve_workers.identity`.
"""

import re
from dataclasses import dataclass
from typing import Final

from specserve_operator.constants import GROUP

TRUST_DOMAIN: Final = GROUP
OPERATOR_ID: Final = f"spiffe://{TRUST_DOMAIN}/operator"

# Audience of the tokens with which pods ask for certificates: of no use to anyone else.
TOKEN_AUDIENCE: Final = f"{GROUP}/identity"
TOKEN_MOUNT: Final = "/var/run/secrets/specserve"
TOKEN_FILE: Final = "token"
# The kubelet brings a new one at four fifths of this time.
TOKEN_SECONDS: Final = 3600

TRUST_MOUNT: Final = "/etc/specserve/trust"
TRUST_FILE: Final = "ca.pem"

# In memory, and as long-lived as the pod: a restarted container goes on with the key and certificate it had.
IDENTITY_MOUNT: Final = "/var/run/specserve"
IDENTITY_DIRECTORY: Final = f"{IDENTITY_MOUNT}/identity"

PORT_HTTPS: Final = 8443
# A workload with this flag among its arguments has pods with certificates.
FLAG_IDENTITY_SERVER: Final = "--identity-server"

# Pools whose pods get certificates. The gateway is a third party's program, which has no use for one.
CERTIFIED_POOLS: Final = frozenset({"prefill", "decode"})

_UID: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PodId:
    """A pod of a service. `uid` is what tells it from a later pod of the same name.

    Raises ValueError for a uid that is no host name label: it becomes one.
    """

    namespace: str
    service: str
    pool: str
    uid: str

    def __post_init__(self) -> None:
        if not _UID.fullmatch(self.uid):
            raise ValueError(f"pod uid {self.uid!r}: letters, digits and '-' expected")

    @property
    def uri(self) -> str:
        """The SPIFFE id."""
        return f"spiffe://{TRUST_DOMAIN}/ns/{self.namespace}/service/{self.service}/pool/{self.pool}/pod/{self.uid}"

    @property
    def hosts(self) -> tuple[str, str]:
        """The host name that all pods of the pool share, and this pod's own."""
        return pool_host(self.namespace, self.service, self.pool), pod_host(self.uid)


def pool_host(namespace: str, service: str, pool: str) -> str:
    """The name by which a client makes sure of a server's pool, whichever pod it is."""
    return f"{pool}.{service}.{namespace}.pool.specserve.internal"


def pod_host(uid: str) -> str:
    """The name by which a client makes sure of this one pod."""
    return f"{uid}.pod.specserve.internal"


def trust_config_name(service: str) -> str:
    """The ConfigMap with the trust bundle."""
    return f"{service}-trust"
