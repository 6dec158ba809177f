"""Hundreds of random services, valid and not: the operator has no bug with any, and none disturbs another."""

import os
import random
from collections import Counter

import pytest

from tests.cluster.api import RefusedError
from tests.cluster.apiserver.fuzz import random_behaviour, random_service
from tests.cluster.mirror import condition_of
from tests.cluster.operator_process import OperatorProcess, tracebacks
from tests.cluster.site import Site, Tenant, service
from tests.cluster.writes import summary

pytestmark = pytest.mark.cluster

SOAK = bool(os.environ.get("SPECSERVE_SOAK"))
SERVICES = 600 if SOAK else 60
SEED = int(os.environ.get("SPECSERVE_FUZZ_SEED", "20261"))
AT_ONCE = 12
DELETED_SHARE = 0.3

REFUSALS = (400, 409, 422)  # a conflict where the operator wrote the status meanwhile
# A new service costs some 16 writes and some status updates while its pods come up; a changed one, a rollout.
WRITES_PER_CHANGE = 60


@pytest.mark.timeout(3600 if SOAK else 300)
def test_random_services_bring_out_no_bug_and_disturb_no_other(
    site: Site, operator: OperatorProcess, tenant: Tenant
) -> None:
    rng = random.Random(SEED)
    neighbour = site.new_namespace(f"neighbour-{tenant.namespace[-6:]}")
    neighbour.apply(service())
    neighbour.wait_ready()
    neighbour.wait_quiet()
    mark, neighbours_pods = site.writes.mark(), {pod["metadata"]["uid"] for pod in neighbour.pods()}
    accepted: Counter[str] = Counter()
    refused = 0
    while sum(accepted.values()) + refused < SERVICES:
        name = f"fuzz-{rng.randrange(AT_ONCE)}"
        tenant.behave(random_behaviour(rng), pool=rng.choice(["prefill", "decode", "gateway"]))
        try:
            if tenant.service(name) is not None and rng.random() < DELETED_SHARE:
                tenant.delete(name)
            site.api.replace("speculativeservices", tenant.namespace, random_service(rng, name))
        except RefusedError as error:
            if error.status not in REFUSALS:
                raise
            refused += 1
        else:
            accepted[name] += 1
            wait_looked_at(tenant, name)

    tenant.wait_quiet()
    writes = Counter(owner(w.name) for w in site.writes.since(mark, namespace=tenant.namespace))
    assert {name: n for name, n in writes.items() if n > WRITES_PER_CHANGE * max(accepted[name], 1)} == {}
    assert operator.is_running
    assert list(tracebacks(operator.log())) == []
    assert operator.metrics().get('specserve_operator_reconcile_total{result="error"}', 0) == 0
    assert (accepted.total() > SERVICES / 3, refused > SERVICES / 20) == (True, True)
    assert summary(site.writes.since(mark, namespace=neighbour.namespace)) == ""
    assert {pod["metadata"]["uid"] for pod in neighbour.ready_pods()} == neighbours_pods
    site.api.delete("namespaces", None, neighbour.namespace)


def owner(name: str) -> str:
    """The service that an object is named after."""
    return "-".join(name.split(".", maxsplit=1)[0].split("-")[:2])


def wait_looked_at(tenant: Tenant, name: str) -> None:
    """Returns when the operator has said something about the newest spec."""

    def is_observed() -> bool:
        obj = tenant.service(name)
        ready = condition_of(obj, "Ready")
        return obj is not None and ready.get("observedGeneration") == obj["metadata"]["generation"]

    tenant.wait(is_observed, what=f"the operator has looked at {name}")
