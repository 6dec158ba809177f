"""An authority, an issuer of ServiceAccount tokens, and pods' certificates, for tests of identity."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from specserve_operator.identity.authority import Authority, AuthorityPolicy, AuthorityState, advance
from specserve_operator.identity.certificates import Subject, key_pem, new_key, to_pem
from specserve_operator.identity.issuer_keys import CONFIGURATION_PATH, KEYS_PATH, KeysUnavailableError
from specserve_operator.identity.keeper import CaConflictError, CaStoreError, Stored
from specserve_operator.identity.names import TOKEN_AUDIENCE, PodId
from specserve_workers.identity.material import MaterialFiles

START = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
ISSUER = "https://kubernetes.default.svc"
PREFILL = PodId("llm", "coder", "prefill", "11111111-aaaa")
DECODE = PodId("llm", "coder", "decode", "22222222-bbbb")


@dataclass
class Clock:
    """A clock that stands still until it is told to go on."""

    time: datetime = START

    def now(self) -> datetime:
        return self.time

    def seconds(self) -> float:
        return self.time.timestamp()

    def go(self, **delta: float) -> None:
        self.time += timedelta(**delta)


def make_authority(
    *, now: datetime | None = None, lifetime: timedelta = timedelta(hours=24), state: AuthorityState | None = None
) -> Authority:
    """A new authority, or one by `state`, of the real time unless it is given."""
    policy = AuthorityPolicy(certificate_lifetime=lifetime)
    return Authority(state or advance(None, now or datetime.now(UTC), policy), policy)


def signing_request(key: Any = None, *, name: x509.Name | None = None, names: list[x509.GeneralName] = []) -> bytes:  # noqa: B006
    """PKCS #10 in DER for `key`, or for a new one of the right kind."""
    key = key or new_key()
    builder = x509.CertificateSigningRequestBuilder().subject_name(name or x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    is_edwards = not isinstance(key, ec.EllipticCurvePrivateKey) and not hasattr(key, "private_numbers")
    request = builder.sign(key, None if is_edwards else hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def certified_files(
    directory: Path,
    pod: PodId | str,
    authority: Authority,
    *,
    trust: str | None = None,
    hosts: tuple[str, ...] | None = None,
) -> MaterialFiles:
    """A pod's directory with a new key and certificate. `pod` may be any other SPIFFE id."""
    files = MaterialFiles(directory)
    certify_again(files, pod, authority, trust=trust, hosts=hosts)
    return files


def certify_again(
    files: MaterialFiles,
    pod: PodId | str,
    authority: Authority,
    *,
    trust: str | None = None,
    hosts: tuple[str, ...] | None = None,
) -> None:
    """Replaces key and certificate, as a renewal does."""
    key = new_key()
    uri = pod if isinstance(pod, str) else pod.uri
    if hosts is None:
        hosts = () if isinstance(pod, str) else pod.hosts
    certificate = authority.certify(key.public_key(), Subject(uri=uri, hosts=hosts), datetime.now(UTC))
    files.write_trust((trust or authority.trust_bundle).encode())
    files.write_pair(key_pem(key).encode(), to_pem(certificate).encode())


@dataclass
class FakeStore:
    """A place for the authority's state that counts its versions, and fails as it is told to."""

    data: bytes | None = None
    version: int = 1
    saves: int = 0
    is_down: bool = False

    async def load(self) -> Stored:
        if self.is_down:
            raise CaStoreError("the store is down")
        return Stored(self.data, str(self.version))

    async def save(self, data: bytes, *, version: str) -> str:
        if self.is_down:
            raise CaStoreError("the store is down")
        if version != str(self.version):
            raise CaConflictError("somebody else was faster")
        self.put(data)
        self.saves += 1
        return str(self.version)

    def put(self, data: bytes | None) -> None:
        self.data = data
        self.version += 1


@dataclass
class FakeIssuer:
    """An API server that signs tokens and publishes its keys. `reads` counts reads of the keys."""

    keys: dict[str, ec.EllipticCurvePrivateKey] = field(default_factory=lambda: {"key-1": new_key()})
    is_down: bool = False
    reads: int = 0
    documents: dict[str, Any] = field(default_factory=dict)

    async def get(self, path: str) -> Any:
        if self.is_down:
            raise KeysUnavailableError("the API server does not answer")
        if path in self.documents:
            return self.documents[path]
        if path == CONFIGURATION_PATH:
            return {"issuer": ISSUER, "jwks_uri": "https://elsewhere/openid/v1/jwks"}
        assert path == KEYS_PATH
        self.reads += 1
        return {"keys": [public_jwk(key_id, key) for key_id, key in self.keys.items()]}

    def token(
        self,
        *,
        now: datetime = START,
        key_id: str = "key-1",
        headers: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> str:
        """A token as Kubernetes makes it, with changed claims; None removes one."""
        claims = pod_claims(now) | changes
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(
            claims, self.keys[key_id], algorithm="ES256", headers={"kid": key_id, "typ": None} | dict(headers or {})
        )


def pod_claims(now: datetime = START) -> dict[str, Any]:
    """Claims of a projected token of the decode pod `coder-decode-1`."""
    return {
        "aud": [TOKEN_AUDIENCE],
        "exp": int(now.timestamp()) + 3600,
        "iat": int(now.timestamp()),
        "nbf": int(now.timestamp()),
        "iss": ISSUER,
        "sub": "system:serviceaccount:llm:default",
        "kubernetes.io": {
            "namespace": "llm",
            "node": {"name": "node-1", "uid": "33333333"},
            "pod": {"name": "coder-decode-1", "uid": DECODE.uid},
            "serviceaccount": {"name": "default", "uid": "44444444"},
        },
    }


def public_jwk(key_id: str, key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
    """A public key as the API server publishes it."""
    document: dict[str, Any] = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key()))
    return document | {"kid": key_id, "use": "sig", "alg": "ES256"}


def raw_token(header: Mapping[str, Any], claims: Mapping[str, Any], signature: bytes = b"") -> str:
    """A token that no library would make."""
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
