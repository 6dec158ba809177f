"""The operator's own certificate: its server shows it to pods, and its calls show it to their control ports.

It is made in this process, by the authority that is here anyway, and made anew after half its life and whenever the
authorities are others.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import grpc

from specserve_operator.identity.authority import Authority
from specserve_operator.identity.certificates import Subject, key_pem, new_key, to_pem
from specserve_operator.identity.names import OPERATOR_ID

_HALF: Final = 2


@dataclass(frozen=True, slots=True)
class OperatorCertificate:
    """What a TLS library wants to be given. `version` is another one for every new certificate."""

    version: int
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    trust_bundle_pem: bytes


class OperatorTls:
    """The certificate of now.

    `authority` gives the authority of now; `hosts` are the names under which pods reach the operator.
    """

    def __init__(
        self, authority: Callable[[], Authority], *, hosts: tuple[str, ...], now: Callable[[], datetime]
    ) -> None:
        self._authority = authority
        self._subject = Subject(uri=OPERATOR_ID, hosts=hosts)
        self._now = now
        # gRPC asks from its own threads.
        self._lock = threading.Lock()
        self._made_by: Authority | None = None
        self._renew_at: datetime | None = None
        self._certificate: OperatorCertificate | None = None
        self._channel_credentials: tuple[int, grpc.ChannelCredentials] | None = None

    def certificate(self) -> OperatorCertificate:
        """The certificate of now. Raises RuntimeError while there is no authority. Thread-safe."""
        with self._lock:
            return self._current()

    def _current(self) -> OperatorCertificate:
        authority, now = self._authority(), self._now()
        if self._certificate is not None and authority is self._made_by and self._renew_at and now < self._renew_at:
            return self._certificate
        key = new_key()
        made = authority.certify(key.public_key(), self._subject, now)
        self._made_by, self._renew_at = authority, now + (made.not_valid_after_utc - now) / _HALF
        self._certificate = OperatorCertificate(
            version=0 if self._certificate is None else self._certificate.version + 1,
            certificate_pem=to_pem(made).encode(),
            key_pem=key_pem(key).encode(),
            trust_bundle_pem=authority.trust_bundle.encode(),
        )
        return self._certificate

    def server_credentials(self) -> grpc.ServerCredentials:
        """For callers that have no certificate yet. Every new connection gets the certificate of its time."""
        shown = self.certificate()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            now = self.certificate()
            if now.version == shown.version:
                return None
            shown = now
            return _server_configuration(now)

        # None is how to say that nothing has changed, which the library's types leave out.
        return grpc.dynamic_ssl_server_credentials(_server_configuration(shown), fetch)  # type: ignore[arg-type]

    def channel_credentials(self) -> tuple[int, grpc.ChannelCredentials]:
        """For calls to pods, with their version: a channel keeps for ever what it was opened with."""
        certificate = self.certificate()
        if self._channel_credentials is None or self._channel_credentials[0] != certificate.version:
            credentials = grpc.ssl_channel_credentials(
                root_certificates=certificate.trust_bundle_pem,
                private_key=certificate.key_pem,
                certificate_chain=certificate.certificate_pem,
            )
            self._channel_credentials = certificate.version, credentials
        return self._channel_credentials


def _server_configuration(certificate: OperatorCertificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificate.key_pem, certificate.certificate_pem)])
