"""What a newer operator, or another default image, would change is shown, and done when it is asked for."""

from dataclasses import replace

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.names import ANNOTATION_UPGRADE
from specserve_operator.core.plan import Plan
from specserve_operator.core.status import compute_status
from tests.unit.core.builders import (
    CONFIG,
    FakeCluster,
    disaggregated,
    make_service,
    make_snapshot,
    operator,
)
from tests.unit.core.pinned import (
    NEW_IMAGES,
    delete_records,
    image,
    pods,
    running,
    settle,
    templates,
    upgrade_condition,
)


def test_an_upgrade_that_is_there_is_shown_with_what_it_would_restart() -> None:
    cluster = running(disaggregated())
    plan_ = cluster.plan(disaggregated())
    assert upgrade_condition(cluster, disaggregated(), plan_)[:2] == ("False", "UpToDate")
    cluster.config = NEW_IMAGES
    assert upgrade_condition(cluster, disaggregated(), cluster.plan(disaggregated())) == (
        "True",
        "NewerRevision",
        "prefill, decode would restart: image registry.test/engine:1 -> registry.test/engine:2; "
        "gateway would restart: image registry.test/gateway:1 -> registry.test/gateway:2. "
        "To take it, set the annotation specserve.dev/upgrade to a new value",
    )
    cluster.config = replace(CONFIG, operator_version="2.0")
    with operator(2):
        status, _, message = upgrade_condition(cluster, disaggregated(), cluster.plan(disaggregated()))
    assert status == "True"
    assert "image registry.test/engine:1 stays, the pod template would be that of operator 2.0" in message


def test_a_service_with_an_image_of_its_own_has_no_upgrade_of_the_default_image() -> None:
    service = make_service(engine={"image": "registry.test/mine:7"})
    cluster = running(service)
    cluster.config = replace(CONFIG, default_engine_image="registry.test/engine:2")
    assert upgrade_condition(cluster, service, cluster.plan(service))[:2] == ("False", "UpToDate")


def test_outdated_crds_are_told_of_in_place_of_an_upgrade() -> None:
    cluster = running(disaggregated())
    snapshot = make_snapshot(disaggregated(), cluster.children(), crd_problem="the CRDs lack SpeculativeService.spec.x")
    conditions = compute_status(snapshot, cluster.plan(disaggregated()))["conditions"]
    (found,) = (c for c in conditions if c["type"] == "UpgradeAvailable")
    assert (found["status"], found["reason"]) == ("True", "CRDOutdated")
    assert found["message"] == "the CRDs lack SpeculativeService.spec.x"


def test_an_upgrade_is_taken_once_and_removing_the_request_takes_nothing_back() -> None:
    cluster = running(disaggregated())
    old = pods(cluster)
    cluster.config = NEW_IMAGES
    asked = disaggregated(annotations={ANNOTATION_UPGRADE: "1"})
    settle(cluster, asked, version=2)
    new = pods(cluster)
    assert set(new.values()) & set(old.values()) == set()
    assert image(cluster, "gateway") == NEW_IMAGES.gateway_image
    assert upgrade_condition(cluster, asked, _plan(cluster, asked, 2))[:2] == ("False", "UpToDate")
    settle(cluster, asked, version=3)
    settle(cluster, disaggregated(), version=3)
    delete_records(cluster)
    settle(cluster, disaggregated(), version=3)
    assert pods(cluster) == new
    settle(cluster, disaggregated(annotations={ANNOTATION_UPGRADE: "2"}), version=3)
    assert set(pods(cluster).values()) & set(new.values()) == set()


def test_an_upgrade_to_what_runs_already_restarts_nothing() -> None:
    cluster = running(disaggregated())
    before = templates(cluster)
    settle(cluster, disaggregated(annotations={ANNOTATION_UPGRADE: "now"}))
    assert templates(cluster) == before


def test_an_upgrade_rolls_within_the_bounds_of_the_rollout() -> None:
    service = disaggregated(annotations={ANNOTATION_UPGRADE: "1"}, decode={"replicas": 3})
    cluster = running(disaggregated(decode={"replicas": 3}))
    with operator(2):
        for _ in range(30):
            cluster.step(service)
            assert 3 <= len(cluster.pods("decode")) <= 4


def _plan(cluster: FakeCluster, service: SpeculativeService, version: int) -> Plan:
    with operator(version):
        return cluster.plan(service)
