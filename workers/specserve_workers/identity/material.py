"""Key, certificate and trusted authorities of a pod, as files that its processes share.

`identity.pem` has the private key and the certificate after it, `trust.pem` the authorities. Both are replaced as a
whole. They lie in a directory in memory that lives as long as the pod: its first process writes them, the engine's
processes read them, and a container that is started anew finds them again, whether or not the operator is there.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

logger = logging.getLogger(__name__)

PAIR_FILE: Final = "identity.pem"
TRUST_FILE: Final = "trust.pem"

_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_Signature = tuple[tuple[int, int, int], ...]


class NoIdentityError(Exception):
    """This pod has no valid certificate at the moment. The message says why."""


class MaterialError(ValueError):
    """Files that hold no usable key, certificate or authorities. The message names the file."""


@dataclass(frozen=True, slots=True)
class Material:
    """What a TLS library wants to be given, all PEM.

    `version` is another one whenever something of it is; of one `MaterialFiles`, it grows.
    """

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    trust_pem: bytes
    not_before: datetime
    not_after: datetime
    uris: tuple[str, ...]
    version: int = 0

    @property
    def lifetime(self) -> timedelta:
        return self.not_after - self.not_before


class MaterialSource(Protocol):
    """Where TLS takes its material from, at each new connection."""

    def current(self) -> Material:
        """The material of now. Raises `NoIdentityError`."""
        ...


class MaterialFiles:
    """The files of one directory. Thread-safe; reading costs next to nothing while nothing has changed."""

    def __init__(self, directory: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._directory = directory
        self._now = now
        self._lock = threading.Lock()
        self._seen: _Signature | None = None
        self._material: Material | None = None
        self._problem = "no certificate yet"
        self._version = 0

    def current(self) -> Material:
        """See `MaterialSource`. Files that are damaged leave what was read before in force."""
        with self._lock:
            signature = self._signature()
            if signature != self._seen:
                self._seen = signature
                self._load()
            material, problem = self._material, self._problem
        if material is None:
            raise NoIdentityError(problem)
        if self._now() >= material.not_after:
            raise NoIdentityError(f"the certificate has expired at {material.not_after.isoformat()}")
        return material

    def write_pair(self, key_pem: bytes, certificate_pem: bytes) -> None:
        """Replaces key and certificate. Raises OSError."""
        self._write(PAIR_FILE, key_pem + certificate_pem)

    def write_trust(self, trust_pem: bytes) -> None:
        """Replaces the authorities, if they are others. Raises OSError."""
        if self.read_trust() != trust_pem:
            self._write(TRUST_FILE, trust_pem)

    def read_trust(self) -> bytes:
        """The authorities as written last; empty if there are none."""
        try:
            return (self._directory / TRUST_FILE).read_bytes()
        except FileNotFoundError:
            return b""

    def _signature(self) -> _Signature:
        found = []
        for name in (PAIR_FILE, TRUST_FILE):
            try:
                status = os.stat(self._directory / name)
            except FileNotFoundError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return tuple(found)

    def _load(self) -> None:
        try:
            pair = (self._directory / PAIR_FILE).read_bytes()
            trust = (self._directory / TRUST_FILE).read_bytes()
        except FileNotFoundError:
            return
        try:
            material = read_material(pair, trust, version=self._version + 1)
        except MaterialError as error:
            self._problem = f"{self._directory}: {error}"
            logger.warning("%s", self._problem)
            return
        self._material, self._version = material, material.version

    def _write(self, name: str, content: bytes) -> None:
        """Only for this user to read, and never half-written."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._directory / f".{name}.{os.getpid()}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        new.replace(self._directory / name)


def read_material(pair_pem: bytes, trust_pem: bytes, *, version: int = 0) -> Material:
    """Checks that the key is the certificate's, and that there are authorities. Raises `MaterialError`."""
    at = pair_pem.find(_CERTIFICATE)
    if at < 0:
        raise MaterialError(f"{PAIR_FILE}: no certificate")
    key_pem, certificate_pem = pair_pem[:at], pair_pem[at:]
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        is_pair = certificate.public_key() == key.public_key()
        uris = uris_of(certificate)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise MaterialError(f"{PAIR_FILE}: no key with its certificate") from error
    if not is_pair:
        raise MaterialError(f"{PAIR_FILE}: the key is not the certificate's")
    read_authorities(trust_pem)
    return Material(
        key_pem=key_pem,
        certificate_pem=certificate_pem,
        trust_pem=trust_pem,
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        uris=uris,
        version=version,
    )


def uris_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The URIs a certificate is made out for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.UniformResourceIdentifier))


def read_authorities(trust_pem: bytes) -> list[x509.Certificate]:
    """At least one. Raises `MaterialError`."""
    try:
        return x509.load_pem_x509_certificates(trust_pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise MaterialError(f"{TRUST_FILE}: no certificates") from error


def is_trusted(certificate_pem: bytes, trust_pem: bytes) -> bool:
    """Whether one of the authorities has signed the certificate."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    for authority in read_authorities(trust_pem):
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return True
    return False


def merge_bundles(*bundles: bytes) -> bytes:
    """All authorities of several bundles, each once. Raises `MaterialError` for one that is damaged."""
    found = {
        certificate.public_bytes(serialization.Encoding.PEM)
        for bundle in bundles
        if bundle
        for certificate in read_authorities(bundle)
    }
    return b"".join(sorted(found))


def throwaway_material() -> Material:
    """Key and certificate that nobody trusts and that trust nobody else: for servers of a pod that has none yet."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "no certificate yet")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.PKCS8
    key_pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return read_material(key_pem + pem, pem)
