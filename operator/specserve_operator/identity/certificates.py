"""X.509 certificates from values. Pure but for what signing draws at random.

Everything is EC on P-256 with SHA-256: small, quick to make, and known to every TLS library.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

MAX_SIGNING_REQUEST_BYTES: Final = 4096
# Clocks of nodes differ: a certificate is valid this long before it was made, or a tenth of its life if that is less.
MAX_BACKDATE: Final = timedelta(minutes=5)

_CURVE: Final = ec.SECP256R1
_DIGITAL_SIGNATURE: Final = "digital_signature"
_KEY_USAGES: Final = (
    _DIGITAL_SIGNATURE,
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class SigningRequestError(ValueError):
    """A signing request that nothing is signed for. The message says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a certificate is made out for: a SPIFFE id, and the host names that it may serve under."""

    uri: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate with its private key, both PEM."""

    certificate_pem: str
    key_pem: str = field(repr=False)


def new_key() -> PrivateKey:
    """A new private key."""
    return ec.generate_private_key(_CURVE())


def new_ca(now: datetime, lifetime: timedelta) -> KeyPair:
    """A self-signed authority that may sign certificates of pods, and no other authority."""
    key = new_key()
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "specserve"),
            # Two authorities that are trusted at the same time must differ by name: libraries look them up by it.
            x509.NameAttribute(NameOID.COMMON_NAME, f"specserve pods {x509.random_serial_number():x}"[:40]),
        ]
    )
    builder = (
        _builder(key.public_key(), now, lifetime)
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    return KeyPair(to_pem(certificate), key_pem(key))


def issue(
    public_key: PublicKey,
    subject: Subject,
    *,
    ca: x509.Certificate,
    ca_key: PrivateKey,
    now: datetime,
    lifetime: timedelta,
) -> x509.Certificate:
    """A certificate for both ends of a connection. It never outlives its authority."""
    lifetime = min(lifetime, ca.not_valid_after_utc - now)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(subject.uri)]
    names += [x509.DNSName(host) for host in subject.hosts]
    issuer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(public_key, now, lifetime)
        .subject_name(x509.Name([]))
        .issuer_name(ca.subject)
        # Critical, as it must be where there is no subject.
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(_DIGITAL_SIGNATURE), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
    )
    return builder.sign(ca_key, hashes.SHA256())


def public_key_of(signing_request: bytes) -> PublicKey:
    """The key of a PKCS #10 request in DER whose sender has the private one. Nothing else of the request counts.

    Raises `SigningRequestError`.
    """
    if len(signing_request) > MAX_SIGNING_REQUEST_BYTES:
        raise SigningRequestError(f"the signing request has more than {MAX_SIGNING_REQUEST_BYTES} bytes")
    try:
        request = x509.load_der_x509_csr(signing_request)
        key = request.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise SigningRequestError("the signing request is not PKCS #10 in DER with a known type of key") from error
    if not isinstance(key, PublicKey) or not isinstance(key.curve, _CURVE):
        raise SigningRequestError("the key must be an EC key on the curve P-256")
    try:
        is_signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm):
        is_signed = False
    if not is_signed:
        raise SigningRequestError("the signing request is not signed with its own key")
    return key


def to_pem(certificate: x509.Certificate) -> str:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def key_pem(key: PrivateKey) -> str:
    """A private key as unencrypted PKCS #8 PEM."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def read_certificate(pem: str) -> x509.Certificate:
    """Raises ValueError."""
    return x509.load_pem_x509_certificate(pem.encode())


def read_key(pem: str) -> PrivateKey:
    """Raises ValueError for what is no private EC key on P-256."""
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"no private key: {error}") from error
    if not isinstance(key, PrivateKey) or not isinstance(key.curve, _CURVE):
        raise ValueError("the private key is not an EC key on the curve P-256")
    return key


def is_pair(certificate: x509.Certificate, key: PrivateKey) -> bool:
    """Whether the key is the certificate's."""
    return certificate.public_key() == key.public_key()


def _builder(key: PublicKey, now: datetime, lifetime: timedelta) -> x509.CertificateBuilder:
    # Certificates know no fractions of seconds; the end is rounded down, so that it is never later than promised.
    begin = (now - min(MAX_BACKDATE, lifetime / 10)).astimezone(UTC).replace(microsecond=0)
    end = (now + lifetime).astimezone(UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*granted: str) -> x509.KeyUsage:
    usages: Iterable[tuple[str, bool]] = ((name, name in granted) for name in _KEY_USAGES)
    return x509.KeyUsage(**dict(usages))
