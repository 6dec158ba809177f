"""Two installations over the same namespaces by mistake: neither works at full speed against the other for ever."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve_operator.cluster.kube.repairs import BURST, SECONDS_EACH
from tests.cluster.operator_process import OperatorOptions, OperatorProcess, tracebacks
from tests.cluster.site import Site, Tenant, service

pytestmark = pytest.mark.cluster

OTHER, IDENTITY_SECRET = "specserve-other", "specserve-operator-identity"
WATCHED_SECONDS = 12.0


@pytest.fixture
def rival(site: Site, operator: OperatorProcess, tmp_path: Path) -> Iterator[OperatorProcess]:
    """A second one beside `operator`, with an authority of its own: they never agree on what pods are to trust."""
    site.api.create("namespaces", None, {"metadata": {"name": OTHER}})
    site.api.create("secrets", OTHER, {"metadata": {"name": IDENTITY_SECRET}})
    kubeconfig = site.control_plane.kubeconfig
    with OperatorProcess(kubeconfig, tmp_path / "rival.log", OperatorOptions(namespace=OTHER)) as started:
        started.start()
        yield started
    site.api.delete("namespaces", None, OTHER)


def test_operators_that_undo_each_other_slow_down_and_say_so(
    tenant: Tenant, operator: OperatorProcess, rival: OperatorProcess
) -> None:
    tenant.apply(service())
    tenant.wait(
        lambda: "is changed back again and again" in str(tenant.status().get("conditions")),
        what="the service says that something is changed back",
    )

    changes = [c for c in tenant.history("configmaps") if c.name == "coder-trust" and c.type == "MODIFIED"]
    assert len(changes) <= 2 * (BURST + 5)
    mark, until = tenant.mirror.mark(), time.monotonic() + WATCHED_SECONDS
    tenant.wait(lambda: time.monotonic() > until, what="the time is over")
    later = [c for c in tenant.history("configmaps", mark) if c.name == "coder-trust"]
    assert len(later) <= 2 * (WATCHED_SECONDS / SECONDS_EACH + 2)
    for process in (operator, rival):
        assert not list(tracebacks(process.log()))
