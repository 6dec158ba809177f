"""Two operators and one Lease: one works, and the other takes over."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.operator_process import NAMESPACE, OperatorOptions, OperatorProcess, install_rules, tracebacks
from tests.cluster.site import Site, Tenant, service

pytestmark = pytest.mark.cluster

LEASE = "specserve-operator"


@pytest.fixture
def pair(site: Site, no_operator: None, tmp_path: Path) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """Two operators; the first leads, the second has been started after it."""
    kubeconfig = install_rules(site.control_plane, leader_election=True)
    with (
        OperatorProcess(kubeconfig, tmp_path / "a.log", OperatorOptions(leader_election=True, pod_name="a")) as first,
        OperatorProcess(kubeconfig, tmp_path / "b.log", OperatorOptions(leader_election=True, pod_name="b")) as second,
    ):
        first.start()
        second.start(wait=False)
        yield first, second
    if site.api.get("leases", NAMESPACE, LEASE) is not None:
        site.api.delete("leases", NAMESPACE, LEASE)


def holder(site: Site) -> str:
    lease = site.api.get("leases", NAMESPACE, LEASE) or {}
    return str((lease.get("spec") or {}).get("holderIdentity", ""))


def reconciles(operator: OperatorProcess) -> float:
    return operator.metrics().get('specserve_operator_reconcile_total{result="ok"}', 0.0)


def test_second_operator_stands_by_and_takes_over_when_the_first_stands_still(
    site: Site, tenant: Tenant, pair: tuple[OperatorProcess, OperatorProcess]
) -> None:
    first, second = pair
    second.wait_ready()
    tenant.apply(service())
    tenant.wait_ready()
    assert holder(site) == "a"
    assert (reconciles(first) > 0, reconciles(second)) == (True, 0)

    first.freeze()
    tenant.change(engine={"image": "engine:b"})
    tenant.wait_ready()
    assert holder(site) == "b"
    assert reconciles(second) > 0

    # It must not go on as if it still led, nor live on without leading.
    first.thaw()
    assert first.wait_ended() == 1
    assert f"the lease {NAMESPACE}/{LEASE} was " in first.log()
    assert second.is_running
    assert list(tracebacks(first.log() + second.log())) == []


def test_nothing_waits_in_the_line_of_an_operator_that_stands_by(
    tenant: Tenant, pair: tuple[OperatorProcess, OperatorProcess]
) -> None:
    """It would wait for ever, and the probe would have the operator killed for it."""
    first, second = pair
    second.wait_ready()
    tenant.apply(service())
    tenant.wait_ready()
    second.kill()
    second.start()
    assert second.metrics()["specserve_operator_cached_objects"] > 0
    assert second.metrics()["specserve_operator_workqueue_depth"] == 0
    assert second.metrics()["specserve_operator_workqueue_oldest_key_age_seconds"] == 0
    assert first.is_running


def test_operator_that_is_stopped_hands_over_at_once(
    site: Site, tenant: Tenant, pair: tuple[OperatorProcess, OperatorProcess]
) -> None:
    first, second = pair
    second.wait_ready()
    assert first.stop() == 0
    assert holder(site) != "a"
    tenant.apply(service())
    tenant.wait_ready()
    assert (holder(site), reconciles(second) > 0) == ("b", True)
