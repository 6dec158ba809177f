"""The call to the operator's certificate service."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from specserve_protos.v1alpha1 import identity_pb2 as pb
from specserve_protos.v1alpha1 import identity_pb2_grpc as pb_grpc

CALL_SECONDS: Final = 10.0


class CertifyError(Exception):
    """No certificate was given. The message says why, and by whom."""


@dataclass(frozen=True, slots=True)
class Certified:
    """A new key with its certificate, and the authorities of now; all PEM."""

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    trust_pem: bytes


@dataclass(frozen=True, slots=True)
class CertificateClient:
    """Asks the operator for certificates of this pod.

    Attributes:
        server: HOST:PORT; its certificate must be for HOST.
        token_file: the pod's ServiceAccount token, which the kubelet replaces now and then.
    """

    server: str
    token_file: Path

    def certify(self, trust_pem: bytes) -> Certified:
        """A certificate for a new key, from a server that `trust_pem` vouches for. Raises `CertifyError`."""
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CertifyError(f"--identity-token {self.token_file}: {error}") from error
        key = ec.generate_private_key(ec.SECP256R1())
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
        message = pb.CertifyRequest(token=token, signing_request=request.public_bytes(serialization.Encoding.DER))
        credentials = grpc.ssl_channel_credentials(root_certificates=trust_pem)
        options = [("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]
        try:
            with grpc.secure_channel(self.server, credentials, options=options) as channel:
                answer = pb_grpc.IdentityServiceStub(channel).Certify(message, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise CertifyError(f"--identity-server {self.server}: {_explain(error)}") from error
        form = serialization.PrivateFormat.PKCS8
        key_pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        return Certified(key_pem, answer.certificate_pem.encode(), answer.trust_bundle_pem.encode())


def _explain(error: grpc.RpcError) -> str:
    call: Any = error  # what is raised is the call as well, which the library's types do not say
    return f"{call.code().name}: {call.details()}"
