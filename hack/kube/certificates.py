"""Certificates, keys and kubeconfigs of a test cluster. Everything is valid for a month."""

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALIDITY = datetime.timedelta(days=30)
# Certificates are valid from a little before they are made, for clocks that differ.
BACKDATING = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> None:
        """Writes `name`.crt and `name`.key, the key readable by its owner only."""
        write_private(folder / f"{name}.key", self.key)
        (folder / f"{name}.crt").write_bytes(self.certificate)


class Authority:
    """A certificate authority that signs for servers and clients alike."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, common_name: str) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(common_name)
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The authority that `write` left in `folder`."""
        certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError(f"{folder / 'ca.key'} is no elliptic curve key")
        return cls(certificate, key)

    def write(self, folder: Path) -> None:
        Credentials(self.certificate, _key_pem(self._key)).write(folder, "ca")

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate, PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, common_name: str, groups: Sequence[str] = (), *, hosts: Sequence[str] = ()) -> Credentials:
        """Credentials for a server at `hosts` (names and addresses) or a client.

        The API server takes the common name as the user and the organizations as its groups.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = (
            _builder(_name(common_name, groups), self._certificate.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Credentials(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def service_account_keys() -> tuple[bytes, bytes]:
    """A private and a public key, PEM, for signing service account tokens: RSA, as most clusters have."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _key_pem(key), public


def render_kubeconfig(server: str, authority_certificate: bytes, *, user: str, credentials: Credentials) -> str:
    """A kubeconfig, as YAML, with everything in it and nothing beside it."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "specserve",
        "contexts": [{"name": "specserve", "context": {"cluster": "specserve", "user": user}}],
        "clusters": [
            {
                "name": "specserve",
                "cluster": {"server": server, "certificate-authority-data": _base64(authority_certificate)},
            }
        ],
        "users": [
            {
                "name": user,
                "user": {
                    "client-certificate-data": _base64(credentials.certificate),
                    "client-key-data": _base64(credentials.key),
                },
            }
        ],
    }
    return yaml.safe_dump(config, sort_keys=False)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read, at no moment otherwise."""
    path.touch(mode=0o600)
    path.write_bytes(content)


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATING)
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str, groups: Sequence[str] = ()) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
