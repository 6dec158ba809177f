"""What the control plane makes of `scale` and `upgrade`, against a cluster that only takes notes."""

from typing import Any

import pytest

from specserve_operator.cli.server import BadRequest, ControlPlaneApi, NotFound, external_replicas
from specserve_operator.cluster.protocol import ApplyOutcome
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.names import ANNOTATION_UPGRADE
from specserve_operator.core.objects import Manifest, ServiceKey

KEY = ServiceKey("default", "tiny")
SERVICE: Manifest = {
    "apiVersion": "specserve.dev/v1alpha1",
    "kind": "SpeculativeService",
    "metadata": {"name": "tiny", "namespace": "default", "annotations": {"team": "search"}},
    "spec": {
        "model": {"uri": "hf://acme/coder"},
        "decode": {"scaling": {"mode": "External", "maxReplicas": 4}},
        "gateway": {"port": 18080},
    },
}


class Notes:
    """Stands in for a LocalCluster."""

    def __init__(self, service: Manifest = SERVICE, outcome: ApplyOutcome = ApplyOutcome.CONFIGURED) -> None:
        self.service, self.outcome = service, outcome
        self.scaled: dict[str, int] = {}
        self.stored: list[Manifest] = []

    def get_object(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self.service if (namespace, name) == (KEY.namespace, KEY.name) else None

    def list_objects(self, kind: str, namespace: str | None = None) -> list[Manifest]:
        return [self.service]

    async def put_service(self, manifest: Manifest) -> ApplyOutcome:
        self.stored.append(manifest)
        return self.outcome

    async def scale_pool(self, namespace: str, scaler: str, replicas: int) -> ApplyOutcome:
        self.scaled[scaler] = replicas
        return self.outcome


def make_api(cluster: Notes) -> ControlPlaneApi:
    config = OperatorConfig("engine:1", "gateway:1", "1", local=True)
    return ControlPlaneApi(cluster, config, on_shut_down=lambda: None)  # type: ignore[arg-type]


async def test_a_pool_in_mode_external_is_scaled_by_its_scaler_and_others_by_the_spec() -> None:
    cluster = Notes()
    result = await make_api(cluster).scale(KEY, {"decode": 3})
    assert result == {"namespace": "default", "name": "tiny", "outcome": "configured"}
    assert (cluster.scaled, cluster.stored) == ({"tiny-decode": 3}, [])


async def test_scaling_to_what_is_so_already_changes_nothing() -> None:
    cluster = Notes(outcome=ApplyOutcome.UNCHANGED)
    assert (await make_api(cluster).scale(KEY, {"decode": 3}))["outcome"] == "unchanged"
    assert (await make_api(cluster).scale(KEY, {}))["outcome"] == "unchanged"


@pytest.mark.parametrize("count", [0, 5])
def test_a_number_outside_of_the_bounds_is_refused_with_the_bounds(count: int) -> None:
    with pytest.raises(BadRequest, match=r"spec\.decode\.scaling of service tiny allows 1 to 4"):
        external_replicas(SERVICE, {"decode": count})


@pytest.mark.parametrize("pool", ["training", "model", "classes"])
async def test_what_is_no_pool_is_refused_before_anything_is_scaled(pool: str) -> None:
    cluster = Notes({**SERVICE, "spec": {**SERVICE["spec"], "classes": []}})
    with pytest.raises(BadRequest, match=f"{pool} is no pool that can be scaled"):
        await make_api(cluster).scale(KEY, {"decode": 2, pool: 1})
    assert cluster.scaled == {}


async def test_what_is_not_there_can_be_neither_scaled_nor_upgraded() -> None:
    other = ServiceKey("default", "other")
    with pytest.raises(NotFound, match="there is no service default/other"):
        await make_api(Notes()).scale(other, {"decode": 2})
    with pytest.raises(NotFound, match="there is no service default/other"):
        await make_api(Notes()).upgrade(other)


def with_condition(status: str) -> Manifest:
    condition: dict[str, Any] = {"type": "UpgradeAvailable", "status": status, "reason": "NewerRevision"}
    return {**SERVICE, "status": {"conditions": [condition]}}


@pytest.mark.parametrize("service", [SERVICE, with_condition("True"), with_condition("Unknown")])
async def test_an_upgrade_is_asked_for_by_an_annotation_that_is_new_each_time(service: Manifest) -> None:
    cluster = Notes(service)
    assert (await make_api(cluster).upgrade(KEY))["outcome"] == "configured"
    await make_api(cluster).upgrade(KEY)
    values = {manifest["metadata"]["annotations"][ANNOTATION_UPGRADE] for manifest in cluster.stored}
    assert len(values) == 2
    assert all(manifest["metadata"]["annotations"]["team"] == "search" for manifest in cluster.stored)
    assert all(manifest["spec"] == SERVICE["spec"] for manifest in cluster.stored)


async def test_nothing_is_asked_for_where_there_is_nothing_to_upgrade() -> None:
    cluster = Notes(with_condition("False"))
    assert (await make_api(cluster).upgrade(KEY))["outcome"] == "unchanged"
    assert cluster.stored == []
