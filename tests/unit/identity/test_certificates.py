"""Signing requests: only the key of an honest one counts. Names: both programs spell them alike."""

from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.identity.certificates import (
    MAX_BACKDATE,
    MAX_SIGNING_REQUEST_BYTES,
    SigningRequestError,
    Subject,
    new_key,
    public_key_of,
    read_key,
)
from specserve_operator.identity.names import OPERATOR_ID, PodId, pod_host, pool_host
from specserve_workers.identity import names as worker_names
from specserve_workers.identity.names import ServiceId
from tests.unit.identity.builders import PREFILL, START, make_authority, signing_request


def test_the_key_of_an_honest_request_is_read() -> None:
    key = new_key()
    assert public_key_of(signing_request(key)) == key.public_key()


def test_what_a_request_says_beside_its_key_counts_for_nothing() -> None:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "operator")])
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(OPERATOR_ID), x509.DNSName("kubernetes.default")]
    key = public_key_of(signing_request(name=name, names=names))
    authority = make_authority(now=START)
    certificate = authority.certify(key, Subject(uri=PREFILL.uri, hosts=PREFILL.hosts), START)
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [n.value for n in found] == [PREFILL.uri, *PREFILL.hosts]
    assert certificate.subject == x509.Name([])
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.digital_signature, usage.key_cert_sign, usage.crl_sign) == (True, False, False)


@pytest.mark.parametrize(
    "key",
    [
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP256K1()),
        ed25519.Ed25519PrivateKey.generate(),
        dsa.generate_private_key(2048),
    ],
    ids=["rsa", "p384", "secp256k1", "ed25519", "dsa"],
)
def test_other_kinds_of_keys_are_refused(key: object) -> None:
    with pytest.raises(SigningRequestError, match="P-256"):
        public_key_of(signing_request(key))


def test_a_request_for_somebody_elses_key_is_refused() -> None:
    mine, theirs = new_key(), new_key()
    request = signing_request(mine)
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    stolen = request.replace(
        mine.public_key().public_bytes(encoding, form), theirs.public_key().public_bytes(encoding, form)
    )
    assert stolen != request
    with pytest.raises(SigningRequestError, match="not signed with its own key"):
        public_key_of(stolen)


def test_a_point_off_the_curve_is_refused() -> None:
    key = new_key()
    point = key.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    bent = point[:-1] + bytes([point[-1] ^ 1])
    with pytest.raises(SigningRequestError):
        public_key_of(signing_request(key).replace(point, bent))


def test_a_certificate_is_no_request() -> None:
    authority = make_authority(now=START)
    certificate = authority.certify(new_key().public_key(), Subject(uri=OPERATOR_ID), START)
    with pytest.raises(SigningRequestError):
        public_key_of(certificate.public_bytes(serialization.Encoding.DER))


def test_pem_is_not_what_is_asked_for() -> None:
    request = x509.load_der_x509_csr(signing_request())
    with pytest.raises(SigningRequestError, match="DER"):
        public_key_of(request.public_bytes(serialization.Encoding.PEM))


def test_a_large_request_is_refused_unread() -> None:
    attributes = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x" * 64)] * 80)
    request = signing_request(name=attributes)
    assert len(request) > MAX_SIGNING_REQUEST_BYTES
    with pytest.raises(SigningRequestError, match="bytes"):
        public_key_of(request)


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(SigningRequestError):
        public_key_of(data)


REQUEST = signing_request()


@given(st.integers(0, len(REQUEST) - 1), st.integers(1, 255))
def test_a_request_with_one_byte_changed_is_refused_or_still_about_its_own_key(place: int, change: int) -> None:
    changed = REQUEST[:place] + bytes([REQUEST[place] ^ change]) + REQUEST[place + 1 :]
    try:
        key = public_key_of(changed)
    except SigningRequestError:
        return
    # Only what was not signed can differ, such as the signature's own form.
    assert key == public_key_of(REQUEST)


@pytest.mark.parametrize(
    ("lifetime", "backdate"),
    [(timedelta(hours=24), MAX_BACKDATE), (timedelta(seconds=60), timedelta(seconds=6))],
)
def test_a_certificate_begins_a_little_before_it_was_made(lifetime: timedelta, backdate: timedelta) -> None:
    authority = make_authority(now=START, lifetime=lifetime)
    certificate = authority.certify(new_key().public_key(), Subject(uri=OPERATOR_ID), START)
    assert certificate.not_valid_before_utc == START - backdate
    assert certificate.not_valid_after_utc == START + lifetime


def test_serial_numbers_are_not_to_be_guessed() -> None:
    authority = make_authority(now=START)
    subject = Subject(uri=OPERATOR_ID)
    numbers = {authority.certify(new_key().public_key(), subject, START).serial_number for _ in range(20)}
    assert len(numbers) == 20
    assert min(numbers) > 2**64


def test_a_key_of_another_kind_is_no_authority() -> None:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = ec.generate_private_key(ec.SECP384R1()).private_bytes(serialization.Encoding.PEM, form, plain)
    with pytest.raises(ValueError, match="P-256"):
        read_key(pem.decode())


labels = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


@given(namespace=labels, service=labels, pool=st.sampled_from(["prefill", "decode"]), uid=labels)
def test_operator_and_workers_spell_names_alike(namespace: str, service: str, pool: str, uid: str) -> None:
    pod = PodId(namespace, service, pool, uid)
    theirs = worker_names.PodId.parse(pod.uri)
    assert theirs == worker_names.PodId(namespace, service, pool, uid)
    assert theirs.uri == pod.uri
    owner = ServiceId(namespace, service)
    assert owner.host(pool) == pool_host(namespace, service, pool) == pod.hosts[0]
    assert pod_host(uid) == pod.hosts[1]
    assert owner.has_pod(pod.uri, pool=pool)
    assert not owner.has_pod(pod.uri, pool="gateway")
    assert not ServiceId(namespace, service + "x").has_pod(pod.uri, pool=pool)
    assert not ServiceId(namespace + "x", service).has_pod(pod.uri, pool=pool)
    assert worker_names.OPERATOR_ID == OPERATOR_ID


@given(st.tuples(labels, labels, labels), st.tuples(labels, labels, labels))
def test_no_two_pools_have_one_host_name(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (pool_host(*one) == pool_host(*other)) is (one == other)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        OPERATOR_ID,
        "spiffe://specserve.dev/ns/llm/service/coder/pool/decode",
        "spiffe://specserve.dev/ns/llm/service/coder/pool/decode/pod/",
        "spiffe://specserve.dev/ns/llm/service/coder/pool/decode/pod/u/x",
        "spiffe://specserve.dev/ns/llm/service/coder/x/pool/decode/pod/u",
        "spiffe://specserve.dev.evil/ns/llm/service/coder/pool/decode/pod/u",
        "https://specserve.dev/ns/llm/service/coder/pool/decode/pod/u",
        "spiffe://specserve.dev/ns/llm/service/coder/pool/decode/pod/u\n",
    ],
)
def test_what_is_no_pods_id_is_nobodys(uri: str) -> None:
    assert worker_names.PodId.parse(uri) is None
    assert not ServiceId("llm", "coder").has_pod(uri, pool="decode")


@pytest.mark.parametrize("uid", ["", "a/b", "a.b", "A", "-a", "a" * 64, "a\n"])
def test_a_uid_that_could_mean_something_else_in_a_name_is_refused(uid: str) -> None:
    with pytest.raises(ValueError, match="uid"):
        PodId("llm", "coder", "decode", uid)


def test_hashes_are_sha256() -> None:
    certificate = make_authority(now=START).certify(new_key().public_key(), Subject(uri=OPERATOR_ID), START)
    assert isinstance(certificate.signature_hash_algorithm, hashes.SHA256)
