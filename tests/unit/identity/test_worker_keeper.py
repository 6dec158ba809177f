"""A pod's certificate over its life: got, renewed, kept over restarts, missed while the operator is away."""

import logging
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.identity.authority import Authority, AuthorityPolicy, AuthorityState, Successor, advance
from specserve_operator.identity.certificates import Subject, key_pem, new_ca, new_key, to_pem
from specserve_workers.identity.certify import Certified, CertifyError
from specserve_workers.identity.keeper import (
    FIRST_RETRY_SECONDS,
    MAX_RETRY_SECONDS,
    POLL_SECONDS,
    IdentityKeeper,
    renewal_time,
    retry_seconds,
)
from specserve_workers.identity.material import (
    Material,
    MaterialError,
    MaterialFiles,
    NoIdentityError,
    merge_bundles,
    read_material,
    throwaway_material,
)
from specserve_workers.identity.names import PodId
from tests.unit.identity.builders import DECODE, START, Clock

POD = PodId(DECODE.namespace, DECODE.service, DECODE.pool, DECODE.uid)
LIFETIME = timedelta(hours=24)
POLICY = AuthorityPolicy(certificate_lifetime=LIFETIME)


@dataclass
class FakeOperator:
    """A certificate service that is a function call away. `uri`: who it takes the caller for."""

    clock: Clock
    state: AuthorityState = field(default_factory=lambda: advance(None, START, POLICY))
    uri: str = DECODE.uri
    is_down: bool = False
    calls: int = 0
    trusted: list[bytes] = field(default_factory=list)

    @property
    def authority(self) -> Authority:
        return Authority(self.state, POLICY)

    def certify(self, trust_pem: bytes) -> Certified:
        self.calls += 1
        self.trusted.append(trust_pem)
        if self.is_down:
            raise CertifyError("--identity-server operator:9443: UNAVAILABLE: nobody there")
        key = new_key()
        certificate = self.authority.certify(key.public_key(), Subject(uri=self.uri), self.clock.now())
        return Certified(key_pem(key).encode(), to_pem(certificate).encode(), self.authority.trust_bundle.encode())


class Pod:
    """A pod with its mounted files. `restart` starts its container anew; the directory in memory stays."""

    def __init__(self, folder: Path, operator: FakeOperator, clock: Clock) -> None:
        self.folder, self.operator, self.clock = folder, operator, clock
        self.bundle_file = folder / "ca.pem"
        self.mount(operator.authority.trust_bundle)
        self.restart()

    def mount(self, bundle: str) -> None:
        self.bundle_file.write_text(bundle)

    def restart(self) -> None:
        self.files = MaterialFiles(self.folder / "identity", now=self.clock.now)
        self.keeper = IdentityKeeper(
            self.operator,
            self.files,
            bundle_file=self.bundle_file,
            pod=POD,
            now=self.clock.now,
            uniform=lambda low, high: (low + high) / 2,
        )

    def live(self, **delta: float) -> None:
        """Time goes on, and whatever is due is done when it is: nearly, where the time is long."""
        end = self.clock.now() + timedelta(**delta)
        least_seconds = timedelta(**delta).total_seconds() / 300
        seconds = self.keeper.step()
        while self.clock.now() + timedelta(seconds=seconds) <= end:
            self.clock.go(seconds=max(seconds, least_seconds))
            seconds = self.keeper.step()
        self.clock.time = end
        self.keeper.step()

    @property
    def material(self) -> Material:
        return self.files.current()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def operator(clock: Clock) -> FakeOperator:
    return FakeOperator(clock)


@pytest.fixture
def pod(tmp_path: Path, operator: FakeOperator, clock: Clock) -> Pod:
    return Pod(tmp_path, operator, clock)


def test_a_new_pod_gets_a_certificate_at_once(pod: Pod, operator: FakeOperator) -> None:
    pod.keeper.step()
    assert pod.material.uris == (DECODE.uri,)
    assert pod.keeper.status.expires_at == (START + LIFETIME).timestamp()
    assert pod.keeper.wait_for_certificate(0)
    assert operator.trusted == [operator.authority.trust_bundle.encode()]


def test_the_key_is_for_this_user_alone(pod: Pod) -> None:
    pod.keeper.step()
    folder = pod.folder / "identity"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "identity.pem").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_it_is_renewed_after_half_its_life_with_another_key(pod: Pod, operator: FakeOperator) -> None:
    pod.live(hours=11.8)
    first = pod.material
    assert operator.calls == 1
    pod.live(hours=0.4)
    assert operator.calls == 2
    assert pod.material.key_pem != first.key_pem
    assert pod.material.not_after > first.not_after


def test_a_day_of_life_takes_two_certificates_and_no_more(pod: Pod, operator: FakeOperator) -> None:
    pod.live(hours=23)
    assert operator.calls == 2


def test_while_the_operator_is_away_the_certificate_serves_to_its_end(pod: Pod, operator: FakeOperator) -> None:
    pod.keeper.step()
    operator.is_down = True
    pod.live(hours=23.9)
    assert pod.material.not_after == START + LIFETIME
    assert pod.keeper.status.failures > 0
    pod.live(hours=0.2)
    with pytest.raises(NoIdentityError, match="expired"):
        pod.files.current()
    assert pod.keeper.status.expires_at == 0
    operator.is_down = False
    pod.live(seconds=MAX_RETRY_SECONDS)
    assert pod.material.not_after > pod.clock.now()


def test_tries_come_less_often_while_they_fail(pod: Pod, operator: FakeOperator) -> None:
    operator.is_down = True
    pod.live(minutes=10)
    # 1, 2, 4, 8, 16 and then every 30 seconds at most, three quarters of that on the average of the jitter.
    assert 20 <= operator.calls <= 35


def test_a_pod_without_the_operator_says_why_it_has_no_certificate(
    pod: Pod, operator: FakeOperator, caplog: pytest.LogCaptureFixture
) -> None:
    operator.is_down = True
    with caplog.at_level(logging.WARNING):
        pod.keeper.step()
    assert "none yet" in caplog.text
    assert "UNAVAILABLE: nobody there" in caplog.text
    with pytest.raises(NoIdentityError):
        pod.files.current()


def test_a_restarted_container_goes_on_with_what_it_had(pod: Pod, operator: FakeOperator) -> None:
    pod.live(hours=1)
    before = pod.material
    operator.is_down = True
    pod.restart()
    pod.keeper.step()
    assert pod.material.certificate_pem == before.certificate_pem
    assert pod.keeper.wait_for_certificate(0)
    assert operator.calls == 1


def test_a_restarted_container_renews_what_has_become_old(pod: Pod, operator: FakeOperator) -> None:
    pod.keeper.step()
    pod.clock.go(hours=20)
    pod.restart()
    pod.keeper.step()
    assert operator.calls == 2


def test_another_pods_certificate_in_the_directory_is_replaced(pod: Pod, operator: FakeOperator) -> None:
    operator.uri = DECODE.uri + "x"
    pod.keeper.step()
    assert "is for" in str(_last_failure(pod, operator))
    operator.uri = DECODE.uri
    pod.live(seconds=5)
    assert pod.material.uris == (DECODE.uri,)


def _last_failure(pod: Pod, operator: FakeOperator) -> Exception:
    with pytest.raises(MaterialError) as caught:
        pod.keeper._take(operator.certify(b""))
    return caught.value


@pytest.mark.parametrize("damage", ["truncate", "garbage", "no key", "other key", "no trust"])
def test_a_damaged_file_is_made_anew(pod: Pod, operator: FakeOperator, damage: str) -> None:
    pod.keeper.step()
    folder = pod.folder / "identity"
    pair, trust = folder / "identity.pem", folder / "trust.pem"
    good = pair.read_bytes()
    match damage:
        case "truncate":
            pair.write_bytes(good[: len(good) // 2])
        case "garbage":
            pair.write_bytes(b"\xff" * 100)
        case "no key":
            pair.write_bytes(good[good.index(b"-----BEGIN CERT") :])
        case "other key":
            pair.write_bytes(key_pem(new_key()).encode() + good[good.index(b"-----BEGIN CERT") :])
        case "no trust":
            trust.write_bytes(b"nothing")
    pod.restart()
    pod.live(seconds=POLL_SECONDS)
    assert pod.material.uris == (DECODE.uri,)


def test_a_successor_is_trusted_as_soon_as_it_is_mounted(pod: Pod, operator: FakeOperator) -> None:
    pod.keeper.step()
    successor = Successor(new_ca(pod.clock.now(), POLICY.ca_lifetime), pod.clock.now() + LIFETIME)
    operator.state = AuthorityState(operator.state.current, START, LIFETIME, successor)
    pod.mount(operator.authority.trust_bundle)
    pod.live(seconds=POLL_SECONDS)
    assert successor.ca.certificate_pem.encode() in pod.material.trust_pem
    assert operator.calls == 1


def test_a_successor_is_trusted_too_if_only_a_new_certificate_tells_of_it(pod: Pod, operator: FakeOperator) -> None:
    pod.keeper.step()
    successor = Successor(new_ca(pod.clock.now(), POLICY.ca_lifetime), pod.clock.now() + LIFETIME)
    operator.state = AuthorityState(operator.state.current, START, LIFETIME, successor)
    pod.live(hours=13)
    assert successor.ca.certificate_pem.encode() in pod.material.trust_pem


def test_an_authority_that_was_lost_is_left_for_the_new_one_at_once(pod: Pod, operator: FakeOperator) -> None:
    pod.live(hours=1)
    operator.state = advance(None, pod.clock.now(), POLICY)
    pod.mount(operator.authority.trust_bundle)
    pod.live(seconds=POLL_SECONDS)
    assert operator.calls == 2
    assert pod.material.trust_pem == operator.authority.trust_bundle.encode()
    assert pod.material.not_after == pod.clock.now() + LIFETIME - timedelta(seconds=POLL_SECONDS)


def test_a_pod_that_waits_for_its_bundle_gets_its_certificate_once_it_is_there(
    pod: Pod, operator: FakeOperator, caplog: pytest.LogCaptureFixture
) -> None:
    pod.bundle_file.unlink()
    with caplog.at_level(logging.WARNING):
        pod.live(seconds=60)
    assert operator.calls == 0
    assert caplog.text.count("waiting for the operator to write it") == 1
    pod.mount(operator.authority.trust_bundle)
    pod.live(seconds=POLL_SECONDS)
    assert pod.material.uris == (DECODE.uri,)


def test_a_damaged_bundle_leaves_the_authorities_of_before(pod: Pod) -> None:
    pod.keeper.step()
    before = pod.material.trust_pem
    pod.mount("garbage")
    pod.live(seconds=60)
    assert pod.material.trust_pem == before


def test_a_certificate_of_an_unknown_authority_is_not_taken(pod: Pod, operator: FakeOperator) -> None:
    honest = operator.state
    stranger = Authority(advance(None, START, POLICY), POLICY)

    def certify(trust_pem: bytes) -> Certified:
        key = new_key()
        certificate = stranger.certify(key.public_key(), Subject(uri=DECODE.uri), START)
        bundle = Authority(honest, POLICY).trust_bundle.encode()
        return Certified(key_pem(key).encode(), to_pem(certificate).encode(), bundle)

    operator.certify = certify  # type: ignore[method-assign]
    pod.keeper.step()
    with pytest.raises(NoIdentityError):
        pod.files.current()
    assert pod.keeper.status.failures == 1


def test_a_defect_does_not_end_the_thread(pod: Pod, operator: FakeOperator, caplog: pytest.LogCaptureFixture) -> None:
    def certify(trust_pem: bytes) -> Certified:
        pod.keeper.stop()
        raise ZeroDivisionError

    operator.certify = certify  # type: ignore[method-assign]
    pod.keeper.start()
    pod.keeper._thread.join(10)
    assert not pod.keeper._thread.is_alive()
    assert "ZeroDivisionError" in caplog.text


@given(st.floats(-1, 1))
def test_renewals_are_spread_around_half_the_life(jitter: float) -> None:
    material = throwaway_material()
    share = (renewal_time(material, jitter=jitter) - material.not_before) / material.lifetime
    assert 0.4 - 1e-9 <= share <= 0.6 + 1e-9


@given(failures=st.integers(1, 10_000), left=st.floats(-1e6, 1e6), jitter=st.floats(0, 1))
def test_waits_are_never_long_compared_with_what_is_left(failures: int, left: float, jitter: float) -> None:
    seconds = retry_seconds(failures, left_seconds=left, jitter=jitter)
    assert seconds >= FIRST_RETRY_SECONDS / 2
    assert seconds <= (max(left / 10, FIRST_RETRY_SECONDS) if left > 0 else MAX_RETRY_SECONDS)
    assert seconds <= retry_seconds(failures + 1, left_seconds=left, jitter=jitter)


def test_bundles_merge_without_doubles_in_one_order() -> None:
    one, two = (new_ca(START, LIFETIME).certificate_pem.encode() for _ in range(2))
    assert merge_bundles(one, two) == merge_bundles(two, one, one, b"")
    assert merge_bundles(one) == one
    with pytest.raises(MaterialError):
        merge_bundles(one, b"garbage")


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_garbage_is_no_material(pair: bytes, trust: bytes) -> None:
    with pytest.raises(MaterialError):
        read_material(pair, trust)


def test_versions_grow_with_every_change_and_only_then(pod: Pod) -> None:
    pod.keeper.step()
    seen = [pod.material.version, pod.material.version]
    pod.files.write_pair(pod.material.key_pem, pod.material.certificate_pem)
    seen.append(pod.material.version)
    assert seen[0] == seen[1] < seen[2]


def test_a_process_that_only_reads_sees_what_another_writes(pod: Pod) -> None:
    reader = MaterialFiles(pod.folder / "identity", now=pod.clock.now)
    with pytest.raises(NoIdentityError, match="no certificate yet"):
        reader.current()
    pod.keeper.step()
    assert reader.current().certificate_pem == pod.material.certificate_pem


def test_the_material_says_nothing_of_its_key(pod: Pod) -> None:
    pod.keeper.step()
    assert "PRIVATE" not in repr(pod.material)
