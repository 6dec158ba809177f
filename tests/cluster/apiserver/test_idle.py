"""A service to which nothing happens costs the API server nothing."""

import os
import time

import pytest

from tests.cluster.api import Object
from tests.cluster.fake_kubelet import GPU
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.site import CHILDREN, Site, Tenant, difference, service
from tests.cluster.writes import summary

pytestmark = pytest.mark.cluster

IDLE_SECONDS = 600.0 if os.environ.get("SPECSERVE_SOAK") else 20.0

# Values that the API server stores in another form than they are given, and fields that it fills in.
NORMALISED = {
    "spec": {
        "tolerations": [{"key": GPU, "operator": "Exists"}],
        "containers": [
            {
                "name": "engine",
                "env": [
                    {"name": "EMPTY", "value": ""},
                    {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                ],
                "resources": {
                    "requests": {"cpu": "1000m", "memory": "1024Mi", "ephemeral-storage": "0.5Gi"},
                    "limits": {"cpu": "2000m", "memory": "2048Mi", GPU: "1"},
                },
                "ports": [{"name": "extra", "containerPort": 7000}],
                "livenessProbe": {"httpGet": {"path": "/health", "port": "http"}},
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1073741824"}}],
    }
}


def apply_idle_services(tenant: Tenant) -> None:
    """Services of several shapes, all ready, and left alone for a moment."""
    draft = {"method": "DraftModel", "uri": "file:///models/draft"}
    tenant.apply(service("plain"))
    tenant.apply(service("alone", prefill=None, decode={"replicas": 1}))
    tenant.apply(
        service(
            "odd",
            speculation={"draft": draft, "length": {"policy": "Static", "tokens": 3}},
            engine={"args": ["--max-model-len", "8192"]},
            prefill={"replicas": 1, "template": NORMALISED},
            decode={"replicas": 2, "template": NORMALISED},
            objectives={"timePerOutputToken": [{"percentile": 90, "milliseconds": 40}]},
        )
    )
    for name in ("plain", "alone", "odd"):
        tenant.wait_ready(name)
    tenant.wait_quiet()


def objects(tenant: Tenant) -> dict[tuple[str, str], Object]:
    """Services and all that is theirs."""
    plurals = ("speculativeservices", "events", *CHILDREN)
    found = {plural: tenant.mirror.find(plural, tenant.namespace) for plural in plurals}
    return {
        (plural, obj["metadata"]["name"]): obj for plural in plurals for obj in found[plural] if is_ours(plural, obj)
    }


def is_ours(plural: str, obj: Object) -> bool:
    """Other controllers have events of their own: they find no use for the addresses of pods that do not run."""
    return plural != "events" or obj["source"].get("component") == "specserve"


@pytest.mark.timeout(IDLE_SECONDS + 240)
def test_idle_services_cause_no_writes_nor_does_a_new_operator(
    site: Site, operator: OperatorProcess, tenant: Tenant
) -> None:
    apply_idle_services(tenant)
    mark, began = site.writes.mark(), time.monotonic()
    tenant.wait(lambda: time.monotonic() - began > IDLE_SECONDS, what="idleness", timeout_seconds=IDLE_SECONDS + 60)
    assert summary(site.writes.since(mark, namespace=tenant.namespace)) == ""

    before, mark = objects(tenant), site.writes.mark()
    operator.restart()
    tenant.wait_quiet()
    changes = {where: list(difference(before.get(where), obj)) for where, obj in objects(tenant).items()}
    assert "\n".join(f"{where} {line}" for where, lines in changes.items() for line in lines) == ""
    writes = site.writes.since(mark, namespace=tenant.namespace)
    # What the API server writes in another form cannot be told from a change: such an object is applied once more.
    normalised = [w for w in writes if w.resource == "deployments" and w.name.startswith("odd-")]
    assert summary(w for w in writes if w not in normalised) == ""
    assert len({w.name for w in normalised}) == len(normalised)
