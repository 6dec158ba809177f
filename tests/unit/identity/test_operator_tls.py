"""The operator's own certificate."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from cryptography import x509

from specserve_operator.identity.authority import Authority
from specserve_operator.identity.certificates import read_certificate
from specserve_operator.identity.names import OPERATOR_ID
from specserve_operator.identity.operator_tls import OperatorTls
from tests.unit.identity.builders import START, Clock, make_authority

HOSTS = ("specserve-operator.specserve.svc",)


class Operator:
    def __init__(self) -> None:
        self.clock = Clock()
        self.authority: Authority = make_authority(now=START, lifetime=timedelta(hours=24))
        self.tls = OperatorTls(lambda: self.authority, hosts=HOSTS, now=self.clock.now)


def test_it_says_operator_and_the_names_of_its_service() -> None:
    certificate = read_certificate(Operator().tls.certificate().certificate_pem.decode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [OPERATOR_ID, *HOSTS]


def test_it_is_made_anew_after_half_its_life() -> None:
    operator = Operator()
    first = operator.tls.certificate()
    operator.clock.go(hours=11.9)
    assert operator.tls.certificate() is first
    operator.clock.go(hours=0.2)
    second = operator.tls.certificate()
    assert second.version == first.version + 1
    assert second.key_pem != first.key_pem


def test_it_is_made_anew_when_the_authorities_are_others() -> None:
    operator = Operator()
    first = operator.tls.certificate()
    operator.authority = make_authority(now=START)
    second = operator.tls.certificate()
    assert second.version == first.version + 1
    assert second.trust_bundle_pem.decode() == operator.authority.trust_bundle


def test_channel_credentials_are_shared_as_long_as_they_are_the_same() -> None:
    operator = Operator()
    version, credentials = operator.tls.channel_credentials()
    assert operator.tls.channel_credentials()[1] is credentials
    operator.clock.go(hours=13)
    assert operator.tls.channel_credentials()[0] == version + 1


def test_threads_that_ask_together_get_the_same() -> None:
    operator = Operator()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: operator.tls.certificate(), range(64)))
    assert {certificate.version for certificate in found} == {0}
    assert len({certificate.certificate_pem for certificate in found}) == 1


def test_its_key_is_not_shown() -> None:
    assert "PRIVATE" not in repr(Operator().tls.certificate())
