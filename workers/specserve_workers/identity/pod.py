"""TLS of one pod: its certificate, and who is on the other end of each of its ports."""

from dataclasses import dataclass
from pathlib import Path

from specserve_workers.identity.certify import CertificateClient
from specserve_workers.identity.channels import PeerTls, ServerTls, operator_rule, pool_rule
from specserve_workers.identity.contexts import PeerContext
from specserve_workers.identity.keeper import IdentityKeeper
from specserve_workers.identity.material import MaterialFiles
from specserve_workers.identity.names import PodId, ServiceId


@dataclass(frozen=True, slots=True)
class PodTls:
    """What the pod's first process does with its certificate. The engine's processes read the same files."""

    files: MaterialFiles
    service: ServiceId
    keeper: IdentityKeeper

    @classmethod
    def of(cls, pod: PodId, *, server: str, token: Path, trust_bundle: Path, directory: Path) -> "PodTls":
        """The TLS of a pod that gets its certificates from `server`; `keeper` is not started."""
        files = MaterialFiles(directory)
        client = CertificateClient(server, token)
        keeper = IdentityKeeper(client, files, bundle_file=trust_bundle, pod=pod)
        return cls(files, ServiceId(pod.namespace, pod.service), keeper)

    @property
    def control_server(self) -> ServerTls:
        """Only the operator controls pods."""
        return ServerTls(self.files, operator_rule())

    @property
    def prefill_server(self) -> ServerTls:
        """Prompts come from decode pods of the same service."""
        return ServerTls(self.files, pool_rule(self.service, pool="decode"))

    @property
    def prefill_client(self) -> PeerContext:
        """Prompts go to prefill pods of the same service."""
        return PeerContext(self.files, self.service, pool="prefill")

    @property
    def prefill_channels(self) -> PeerTls:
        """Leases are given back to prefill pods of the same service."""
        return PeerTls(self.files, self.service, pool="prefill")
