"""Gets this pod's certificate and renews it, for as long as the pod lives.

A certificate is renewed after half its life, so the operator may be away for the other half without anybody noticing.
Without one the pod serves all the same: decode pods prefill by themselves, and nobody can reach the ports that want
certificates. It runs in a thread of its own, since the event loop stands still while the engine starts.
"""

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from specserve_workers.identity.certify import Certified, CertifyError
from specserve_workers.identity.material import (
    Material,
    MaterialError,
    MaterialFiles,
    NoIdentityError,
    is_trusted,
    merge_bundles,
    read_material,
)
from specserve_workers.identity.names import PodId

logger = logging.getLogger(__name__)

# How often the mounted authorities are looked at. The kubelet takes a minute to bring new ones.
POLL_SECONDS: Final = 5.0
FIRST_RETRY_SECONDS: Final = 1.0
MAX_RETRY_SECONDS: Final = 30.0
# While there is a certificate that lasts.
MAX_CALM_RETRY_SECONDS: Final = 300.0


class Certifier(Protocol):
    """E.g. `certify.CertificateClient`."""

    def certify(self, trust_pem: bytes) -> Certified:
        """A certificate for a new key. Raises `CertifyError`."""
        ...


def renewal_time(material: Material, *, jitter: float) -> datetime:
    """When to renew a certificate: after half its life, give or take a tenth. `jitter` in [-1, 1]."""
    return material.not_before + material.lifetime * (0.5 + 0.1 * jitter)


def retry_seconds(failures: int, *, left_seconds: float, jitter: float) -> float:
    """How long to wait after so many failures in a row, at least one. `jitter` in [0, 1].

    `left_seconds`: how long there is still a certificate. Nobody waits longer than a tenth of that, as long as there
    is one; many pods that fail together do not come back together.
    """
    most = MAX_RETRY_SECONDS
    if left_seconds > 0:
        most = min(MAX_CALM_RETRY_SECONDS, max(left_seconds / 10, FIRST_RETRY_SECONDS))
    longest = min(most, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * jitter)


@dataclass(slots=True)
class IdentityStatus:
    """What the metrics say. `expires_at` in seconds since the epoch; 0: there is no certificate."""

    expires_at: float = 0.0
    renewals: int = 0
    failures: int = 0


class IdentityKeeper:
    """See the module's docstring.

    Args:
        files: where the certificate is put, and found again after a restart of the container.
        bundle_file: the mounted authorities.
        pod: who this pod is; another's certificate is not taken.
    """

    def __init__(
        self,
        certifier: Certifier,
        files: MaterialFiles,
        *,
        bundle_file: Path,
        pod: PodId,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._certifier = certifier
        self._files = files
        self._bundle_file = bundle_file
        self._pod = pod
        self._now = now
        self._uniform = uniform
        self.status = IdentityStatus()
        self._bundle = b""
        self._bundle_problem = ""
        self._answered_bundle = b""
        self._is_distrusted = False
        self._failures_in_a_row = 0
        self._retry_at: datetime | None = None
        self._renewal: tuple[int, datetime] | None = None
        self._has_certificate = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specserve-identity", daemon=True)

    def start(self) -> None:
        """Begins to work, in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the work; does not wait for a call that is under way."""
        self._stop.set()

    def wait_for_certificate(self, timeout_seconds: float) -> bool:
        """Whether there has been a certificate before the time is up."""
        return self._has_certificate.wait(timeout_seconds)

    def step(self) -> float:
        """Does what is due, and returns in how many seconds something may be due again."""
        now = self._now()
        self._take_bundle()
        material = self._own_material()
        if self._is_due(material, now) and (self._retry_at is None or now >= self._retry_at):
            self._renew(material, now)
            material = self._own_material()
        self.status.expires_at = 0.0 if material is None else material.not_after.timestamp()
        if material is not None:
            self._has_certificate.set()
        return self._seconds_to_next(material, now)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                seconds = self.step()
            except Exception:
                # A defect here must not end the renewals of a pod that serves.
                logger.exception("the pod's certificate could not be seen to")
                seconds = MAX_RETRY_SECONDS
            self._stop.wait(seconds)

    def _take_bundle(self) -> None:
        """Trusts what is mounted, and what came with the last certificate: either may be the newer one."""
        try:
            bundle = self._bundle_file.read_bytes()
            if bundle == self._bundle:
                return
            trust = merge_bundles(bundle, self._answered_bundle)
        except (OSError, MaterialError) as error:
            if self._bundle_problem != str(error):
                self._bundle_problem = str(error)
                logger.warning("--trust-bundle %s: %s; waiting for the operator to write it", self._bundle_file, error)
            return
        self._bundle_problem = ""
        self._files.write_trust(trust)
        self._bundle = bundle
        material = self._own_material()
        # Authorities that were lost and made anew do not trust what the lost ones have signed.
        self._is_distrusted = material is not None and not is_trusted(material.certificate_pem, bundle)

    def _own_material(self) -> Material | None:
        try:
            material = self._files.current()
        except NoIdentityError:
            return None
        return material if self._pod.uri in material.uris else None

    def _is_due(self, material: Material | None, now: datetime) -> bool:
        return material is None or self._is_distrusted or now >= self._renewal_time(material)

    def _renewal_time(self, material: Material) -> datetime:
        if self._renewal is None or self._renewal[0] != material.version:
            self._renewal = material.version, renewal_time(material, jitter=self._uniform(-1, 1))
        return self._renewal[1]

    def _renew(self, material: Material | None, now: datetime) -> None:
        trust = self._files.read_trust()
        if not trust:
            self._retry_at = now + timedelta(seconds=FIRST_RETRY_SECONDS)
            return
        try:
            certified = self._certifier.certify(trust)
            self._take(certified)
        except (CertifyError, MaterialError) as error:
            self._failures_in_a_row += 1
            self.status.failures += 1
            left_seconds = 0.0 if material is None else (material.not_after - now).total_seconds()
            seconds = retry_seconds(self._failures_in_a_row, left_seconds=left_seconds, jitter=self._uniform(0, 1))
            self._retry_at = now + timedelta(seconds=seconds)
            has_one = "none yet" if material is None else f"the present one lasts {left_seconds:.0f} s"
            logger.warning("no new certificate (%s): %s; trying again in %.1f s", has_one, error, seconds)
            return
        self._failures_in_a_row, self._retry_at, self._is_distrusted = 0, None, False
        self.status.renewals += 1

    def _take(self, certified: Certified) -> None:
        """Puts a new certificate in force. Raises `MaterialError` for one that is not for this pod."""
        trust = merge_bundles(self._bundle, certified.trust_pem)
        material = read_material(certified.key_pem + certified.certificate_pem, trust)
        if material.uris != (self._pod.uri,):
            raise MaterialError(f"the certificate is for {', '.join(material.uris) or 'nobody'}, not {self._pod.uri}")
        if not is_trusted(certified.certificate_pem, trust):
            raise MaterialError("the certificate is of no trusted authority")
        self._answered_bundle = certified.trust_pem
        self._files.write_trust(trust)
        self._files.write_pair(certified.key_pem, certified.certificate_pem)
        logger.info("certificate of %s until %s", self._pod.uri, material.not_after.isoformat())

    def _seconds_to_next(self, material: Material | None, now: datetime) -> float:
        times = [POLL_SECONDS]
        if self._retry_at is not None:
            times.append((self._retry_at - now).total_seconds())
        elif material is not None:
            times.append((self._renewal_time(material) - now).total_seconds())
        return max(0.05, min(times))
