"""Pods are replaced when the user changes what they are made of or asks for an upgrade, and for no other reason."""

from dataclasses import replace
from typing import Any

import pytest

from specserve_operator.api.v1alpha1 import SpeculativeService
from tests.unit.core.builders import (
    CONFIG,
    DRAFT_MODEL,
    FakeCluster,
    disaggregated,
    make_service,
    operator,
)
from tests.unit.core.pinned import (
    DECODE_ARGS,
    NEW_IMAGES,
    TARGET_B,
    delete_records,
    image,
    pods,
    records,
    running,
    settle,
    target_revisions,
    templates,
)

# What restarts nothing


def test_another_default_image_restarts_no_pod() -> None:
    cluster = running(disaggregated())
    before = templates(cluster)
    cluster.config = NEW_IMAGES
    settle(cluster, disaggregated())
    assert templates(cluster) == before


def test_a_new_operator_restarts_no_pod_and_repairs_drift_as_the_old_one_had_rendered() -> None:
    cluster = running(disaggregated())
    before = templates(cluster)
    edited = next(obj for (kind, _), obj in cluster.objects.items() if kind == "Deployment")
    edited["spec"] = {**edited["spec"], "template": {"metadata": {"labels": {}}, "spec": {"containers": []}}}
    with operator(2):
        plan_ = cluster.plan(disaggregated())
        cluster.apply(plan_)
    assert templates(cluster) == before


def test_a_new_operator_still_brings_what_restarts_no_pod_up_to_date() -> None:
    cluster = running(disaggregated())
    service = disaggregated(generation=2, speculation={"draft": DRAFT_MODEL, "mode": "Never"}, gateway={"port": 8080})
    before = templates(cluster)
    cluster.config = NEW_IMAGES
    settle(cluster, service, version=2)
    assert templates(cluster) == before
    assert '"policy": "Off"' in cluster.objects["ConfigMap", "coder-runtime"]["data"]["state.json"]
    assert cluster.objects["Service", "coder-gateway"]["spec"]["ports"][0]["port"] == 8080


def test_scaling_under_a_new_operator_makes_more_of_the_same_pods() -> None:
    cluster = running(disaggregated())
    before = templates(cluster)
    cluster.config = NEW_IMAGES
    settle(cluster, disaggregated(decode={"replicas": 5}), version=2)
    assert templates(cluster) == before
    assert len(cluster.pods("decode")) == 5


@pytest.mark.parametrize("newest", [1, 100])
def test_a_record_that_was_deleted_is_made_again_from_the_live_pods(newest: int) -> None:
    cluster = running(disaggregated())
    settle(cluster, disaggregated(decode=DECODE_ARGS))
    before, recorded = templates(cluster), records(cluster)[-1]["data"]
    delete_records(cluster, newest=newest)
    cluster.config = NEW_IMAGES
    settle(cluster, disaggregated(decode=DECODE_ARGS), version=2)
    assert templates(cluster) == before
    assert records(cluster)[-1]["data"] == recorded


@pytest.mark.parametrize(("lost", "kept"), [("decode", "prefill"), ("prefill", "decode")])
def test_a_pool_of_which_only_an_old_record_is_left_follows_the_pods_that_live(lost: str, kept: str) -> None:
    """Else prefill and decode pods would be of two target revisions, and never pair."""
    cluster = running(disaggregated())
    settle(cluster, disaggregated(model=TARGET_B))
    cluster.config = NEW_IMAGES
    settle(cluster, disaggregated(), version=2)
    before, old_record = pods(cluster), records(cluster)[0]
    assert image(cluster, kept) == NEW_IMAGES.default_engine_image
    delete_records(cluster)
    cluster.objects["ControllerRevision", old_record["metadata"]["name"]] = old_record
    del cluster.objects["Deployment", before[lost]]
    settle(cluster, disaggregated(), version=3)
    assert pods(cluster)[kept] == before[kept]
    assert image(cluster, lost) == NEW_IMAGES.default_engine_image
    assert len(target_revisions(cluster)) == 1


def test_a_record_that_somebody_edited_is_replaced_by_what_the_live_pods_say() -> None:
    cluster = running(disaggregated())
    before = templates(cluster)
    (record,) = records(cluster)
    record["data"] = {"version": 1, "pools": "none"}
    settle(cluster, disaggregated(), version=2)
    assert templates(cluster) == before


def test_a_lost_annotation_costs_nothing_while_there_is_a_record_and_comes_back() -> None:
    cluster = running(disaggregated())
    before = templates(cluster)
    for (kind, _), obj in cluster.objects.items():
        if kind == "Deployment":
            obj["metadata"]["annotations"] = {}
    settle(cluster, disaggregated(), version=2)
    assert templates(cluster) == before
    delete_records(cluster)
    settle(cluster, disaggregated(), version=2)
    assert templates(cluster) == before


def test_a_live_pod_template_with_an_api_servers_defaults_is_taken_over_when_only_that_is_left() -> None:
    cluster = running(disaggregated())
    for deployment in (obj for (kind, _), obj in cluster.objects.items() if kind == "Deployment"):
        template = deployment["spec"]["template"]
        template = {**template, "metadata": {"creationTimestamp": None, **template["metadata"]}}
        template["spec"] = {**template["spec"], "dnsPolicy": "ClusterFirst"}
        deployment["spec"] = {**deployment["spec"], "template": template}
    names = pods(cluster)
    delete_records(cluster)
    settle(cluster, disaggregated(), version=2)
    assert pods(cluster) == names
    for template in templates(cluster).values():
        assert template["spec"]["dnsPolicy"] == "ClusterFirst"
        assert "creationTimestamp" not in template["metadata"]
    delete_records(cluster)
    settle(cluster, disaggregated(), version=1)  # this one knows how it had rendered them
    assert all("dnsPolicy" not in template["spec"] for template in templates(cluster).values())
    assert pods(cluster) == names


# What the user changes


def test_a_change_of_one_pool_under_a_new_operator_restarts_that_pool_only_with_the_image_of_the_other() -> None:
    cluster = running(disaggregated())
    before = pods(cluster)
    cluster.config = NEW_IMAGES
    settle(cluster, disaggregated(decode=DECODE_ARGS), version=2)
    after = pods(cluster)
    assert {pool for pool in before if before[pool] != after[pool]} == {"decode"}
    assert image(cluster, "decode") == image(cluster, "prefill") == CONFIG.default_engine_image
    assert len(target_revisions(cluster)) == 1


def test_a_change_of_both_pools_that_leaves_the_target_keeps_its_image() -> None:
    cluster = running(disaggregated())
    before = target_revisions(cluster)
    cluster.config = NEW_IMAGES
    settle(cluster, disaggregated(kvTransfer={"leaseSeconds": 7}), version=2)
    assert target_revisions(cluster) == before
    assert image(cluster, "decode") == CONFIG.default_engine_image


@pytest.mark.parametrize("spec", [{"model": TARGET_B}, {"engine": {"args": ["--dtype", "float32"]}}])
def test_a_change_of_the_target_takes_both_pools_to_the_new_default_image(spec: dict[str, Any]) -> None:
    cluster = running(disaggregated())
    before = pods(cluster)
    cluster.config = NEW_IMAGES
    settle(cluster, disaggregated(**spec), version=2)
    after = pods(cluster)
    assert {pool for pool in before if before[pool] != after[pool]} == {"prefill", "decode"}
    assert image(cluster, "decode") == image(cluster, "prefill") == NEW_IMAGES.default_engine_image
    assert len(target_revisions(cluster)) == 1


def test_a_prefill_pool_that_is_added_later_gets_the_image_of_the_decode_pods() -> None:
    plain = {"kvTransfer": {"tls": "Disabled"}}
    cluster = running(make_service(**plain))
    cluster.config = NEW_IMAGES
    settle(cluster, make_service(prefill={}, **plain), version=2)
    assert image(cluster, "prefill") == image(cluster, "decode") == CONFIG.default_engine_image
    assert len(target_revisions(cluster)) == 1


def test_an_image_in_the_spec_is_used_at_once_and_whatever_the_default_is() -> None:
    cluster = running(disaggregated())
    cluster.config = NEW_IMAGES
    service = disaggregated(engine={"image": "registry.test/mine:7"})
    settle(cluster, service, version=2)
    assert image(cluster, "decode") == image(cluster, "prefill") == "registry.test/mine:7"


def test_pods_without_certificates_stay_so_together_when_an_operator_begins_to_give_some() -> None:
    plain, secure = {"tls": "Automatic"}, replace(CONFIG, identity_server="operator.svc:9443")
    cluster = FakeCluster(config=replace(secure, local=True))
    settle(cluster, disaggregated(kvTransfer=plain))
    cluster.config = secure
    settle(cluster, disaggregated(kvTransfer=plain, decode=DECODE_ARGS))
    assert len(target_revisions(cluster)) == 1
    for template in templates(cluster).values():
        assert "--identity-server" not in template["spec"]["containers"][0]["args"]


def test_going_back_half_way_through_a_rollout_returns_to_the_pods_that_are_left() -> None:
    """Though the operator that began it is another by now."""
    a, b = disaggregated(decode={"replicas": 4}), disaggregated(decode={"replicas": 4}, model=TARGET_B)
    cluster = running(a)
    before = templates(cluster)
    for _ in range(3):
        cluster.step(b)
    cluster.config = NEW_IMAGES
    settle(cluster, a, version=2)
    assert templates(cluster) == before


def test_going_back_after_the_rollout_resolves_anew() -> None:
    cluster = running(disaggregated())
    before = pods(cluster)
    settle(cluster, disaggregated(model=TARGET_B))
    settle(cluster, disaggregated())
    assert pods(cluster) == before, "the same operator makes the same pods"
    settle(cluster, disaggregated(model=TARGET_B))
    settle(cluster, disaggregated(), version=2)
    assert pods(cluster)["decode"] != before["decode"]


def test_a_lower_draft_maximum_under_a_new_operator_restarts_nothing_and_a_higher_one_only_decode() -> None:
    def with_max(tokens: int) -> SpeculativeService:
        return disaggregated(speculation={"draft": DRAFT_MODEL, "length": {"max": tokens}})

    cluster = running(with_max(8))
    before = pods(cluster)
    settle(cluster, with_max(3), version=2)
    settle(cluster, with_max(8), version=2)
    assert pods(cluster) == before
    settle(cluster, with_max(9), version=2)
    after = pods(cluster)
    assert {pool for pool in before if before[pool] != after[pool]} == {"decode"}
    settle(cluster, with_max(2), version=2)
    assert pods(cluster) == after
