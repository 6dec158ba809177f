"""Pods are replaced when the user changes what they are made of or asks for an upgrade, and for no other reason."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.names import ANNOTATION_UPGRADE, Pool
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import Plan
from specserve_operator.core.records import HISTORY_LIMIT
from specserve_operator.core.status import compute_status
from specserve_operator.render import render
from tests.unit.core.builders import (
    CONFIG,
    DRAFT_MODEL,
    FakeCluster,
    deployments_of,
    disaggregated,
    make_service,
    make_snapshot,
    operator,
)

NEW_IMAGES = replace(CONFIG, default_engine_image="registry.test/engine:2", gateway_image="registry.test/gateway:2")
DECODE_ARGS = {"replicas": 2, "args": ["--max-num-seqs", "4"]}
TARGET_B = {"uri": "file:///models/target-b"}


def settle(cluster: FakeCluster, service: SpeculativeService, *, version: int = 1) -> None:
    """Lets an operator of that version work until nothing changes any more."""
    with operator(version):
        for _ in range(60):
            before = cluster.children()
            cluster.step(service)
            if cluster.children() == before:
                return
    pytest.fail("the cluster does not come to rest")


def running(service: SpeculativeService) -> FakeCluster:
    cluster = FakeCluster()
    settle(cluster, service)
    return cluster


def pods(cluster: FakeCluster) -> dict[str, str]:
    """The names of the Deployments at rest, by pool."""
    found = {str(pool): deployments_of(cluster.children(), pool) for pool in Pool}
    return {pool: one["metadata"]["name"] for pool, (one,) in ((p, d) for p, d in found.items() if d)}


def templates(cluster: FakeCluster) -> dict[str, Manifest]:
    return {name: obj["spec"]["template"] for (kind, name), obj in cluster.objects.items() if kind == "Deployment"}


def image(cluster: FakeCluster, pool: str) -> str:
    (deployment,) = deployments_of(cluster.children(), pool)
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def target_revisions(cluster: FakeCluster) -> set[str]:
    deployments = [d for pool in ("prefill", "decode") for d in deployments_of(cluster.children(), pool)]
    return {d["metadata"]["labels"]["specserve.dev/target-revision"] for d in deployments}


def records(cluster: FakeCluster) -> list[Manifest]:
    """Oldest first."""
    found = [obj for (kind, _), obj in cluster.objects.items() if kind == "ControllerRevision"]
    return sorted(found, key=lambda obj: int(obj["revision"]))


def delete_records(cluster: FakeCluster, *, newest: int = 100) -> None:
    for record in records(cluster)[-newest:]:
        del cluster.objects["ControllerRevision", record["metadata"]["name"]]


def upgrade_condition(cluster: FakeCluster, service: SpeculativeService, plan_: Plan) -> tuple[str, str, str]:
    snapshot = make_snapshot(service, cluster.children(), config=cluster.config)
    conditions = compute_status(snapshot, plan_)["conditions"]
    (found,) = (c for c in conditions if c["type"] == "UpgradeAvailable")
    return found["status"], found["reason"], found["message"]


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


# Upgrades


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


# Records


def test_a_record_has_the_pod_templates_that_run_and_is_made_before_the_workloads() -> None:
    service = disaggregated()
    objects = render(FakeCluster().plan(service))
    kinds = [obj["kind"] for obj in objects]
    assert kinds.index("ControllerRevision") < kinds.index("Deployment")
    (record,) = (obj for obj in objects if obj["kind"] == "ControllerRevision")
    pools = record["data"]["pools"]
    for pool in Pool:
        (deployment,) = deployments_of(objects, pool)
        assert pools[pool]["template"] == deployment["spec"]["template"]
        assert pools[pool]["revision"] == deployment["metadata"]["labels"]["specserve.dev/revision"]
    assert record["metadata"]["ownerReferences"][0]["kind"] == "SpeculativeService"
    assert record["revision"] == 1


def test_nothing_new_is_recorded_while_nothing_changes() -> None:
    cluster = running(disaggregated())
    settle(cluster, disaggregated(decode={"replicas": 5}), version=2)
    assert [record["revision"] for record in records(cluster)] == [1]


def test_going_back_gives_the_old_record_a_new_number() -> None:
    cluster = running(disaggregated())
    (first,) = (record["metadata"]["name"] for record in records(cluster))
    settle(cluster, disaggregated(decode=DECODE_ARGS))
    settle(cluster, disaggregated())
    assert [record["revision"] for record in records(cluster)] == [2, 3]
    assert records(cluster)[-1]["metadata"]["name"] == first


def test_a_record_that_the_cluster_refuses_is_not_numbered_anew_with_every_try() -> None:
    cluster = FakeCluster()
    service = disaggregated()
    for _ in range(20):
        cluster.step(service)
        delete_records(cluster)
    numbers = {
        d["metadata"]["annotations"]["specserve.dev/record"] for d in deployments_of(cluster.children(), "decode")
    }
    assert numbers == {"1"}
    cluster.step(service)
    assert [record["revision"] for record in records(cluster)] == [1]


def test_only_the_last_records_are_kept() -> None:
    cluster = FakeCluster()
    for tokens in range(1, 16):
        settle(cluster, disaggregated(decode={"replicas": 1, "args": ["--max-num-seqs", str(tokens)]}))
    assert len(records(cluster)) == HISTORY_LIMIT
    assert records(cluster)[-1]["revision"] == 15


def test_the_record_of_pods_that_still_live_is_kept_however_old() -> None:
    cluster = running(disaggregated(decode={"replicas": 1}))
    first = records(cluster)[0]["metadata"]["name"]

    def broken(i: int) -> SpeculativeService:
        return disaggregated(decode={"replicas": 1, "args": ["--max-num-seqs", str(i)]})

    for i in range(1, 16):
        plan_ = cluster.plan(broken(i))
        decode = plan_.pool(Pool.DECODE)
        assert decode is not None
        for _ in range(3):
            cluster.step(broken(i), fails=decode.current.name)
    assert first in {record["metadata"]["name"] for record in records(cluster)}


def test_records_of_another_layout_are_left_alone() -> None:
    cluster = running(disaggregated())
    (record,) = records(cluster)
    foreign = {**record, "metadata": {**record["metadata"], "name": "coder-newer"}, "data": {"version": 99}}
    cluster.objects["ControllerRevision", "coder-newer"] = {**foreign, "revision": 100}
    for tokens in range(1, 14):
        settle(cluster, disaggregated(decode={"replicas": 1, "args": ["--max-num-seqs", str(tokens)]}))
    assert ("ControllerRevision", "coder-newer") in cluster.objects


# Any sequence of things that happen


@dataclass(frozen=True)
class Spec:
    """What the user has given, as few things as matter. `shared` concerns both serving pools, and not their target."""

    model: str = "a"
    shared: int = 30
    prefill_args: int = 0
    decode_args: int = 0
    gateway: str = ""
    replicas: int = 2
    draft_max: int = 8

    def to_service(self, upgrade: str | None) -> SpeculativeService:
        def pool(args: int, replicas: int) -> dict[str, Any]:
            return {"replicas": replicas, "args": ["--max-num-seqs", str(args)] if args else []}

        template = {"template": {"spec": {"nodeSelector": {"node": self.gateway}}}} if self.gateway else {}
        return disaggregated(
            model={"uri": f"file:///models/{self.model}"},
            kvTransfer={"leaseSeconds": self.shared},
            prefill=pool(self.prefill_args, 1),
            decode=pool(self.decode_args, self.replicas),
            gateway=template,
            speculation={"draft": DRAFT_MODEL, "length": {"max": self.draft_max}},
            annotations={} if upgrade is None else {ANNOTATION_UPGRADE: upgrade},
        )

    def inputs(self, pool: Pool) -> tuple[Any, ...]:
        match pool:
            case Pool.PREFILL:
                return (self.model, self.shared, self.prefill_args)
            case Pool.DECODE:
                return (self.model, self.shared, self.decode_args)
        return (self.gateway,)


@dataclass
class History:
    """A service through the years."""

    spec: Spec = field(default_factory=Spec)
    version: int = 1
    upgrade: str | None = None
    cluster: FakeCluster = field(default_factory=FakeCluster)

    def happen(self, event: tuple[str, Any]) -> None:
        match event:
            case "spec", (name, value):
                self.spec = replace(self.spec, **{name: value})
            case "operator", version:
                self.version = version
            case "image", tag:
                self.cluster.config = replace(CONFIG, default_engine_image=f"engine:{tag}", gateway_image=f"gw:{tag}")
            case "delete records", count:
                delete_records(self.cluster, newest=count)
            case "upgrade", value:
                self.upgrade = value

    def step(self) -> Plan:
        with operator(self.version):
            return self.cluster.step(self.spec.to_service(self.upgrade))


events = st.one_of(
    st.tuples(
        st.just("spec"),
        st.one_of(
            st.tuples(st.just("model"), st.sampled_from("ab")),
            st.tuples(st.just("shared"), st.sampled_from([30, 7])),
            st.tuples(st.sampled_from(["prefill_args", "decode_args"]), st.integers(0, 2)),
            st.tuples(st.just("gateway"), st.sampled_from(["", "x"])),
            st.tuples(st.just("replicas"), st.integers(1, 3)),
            st.tuples(st.just("draft_max"), st.sampled_from([4, 8, 16])),
        ),
    ),
    st.tuples(st.just("operator"), st.integers(1, 3)),
    st.tuples(st.just("image"), st.integers(1, 3)),
    st.tuples(st.just("delete records"), st.sampled_from([1, 100])),
    st.tuples(st.just("upgrade"), st.sampled_from([None, "1", "2"])),
)


@settings(max_examples=80)
@given(st.lists(st.tuples(events, st.integers(1, 3)), max_size=8))
def test_pods_are_replaced_only_when_their_inputs_change_or_an_upgrade_is_asked_for(
    history: list[tuple[tuple[str, Any], int]],
) -> None:
    world = History()
    before, taken = world.step(), None
    for event, steps in history:
        old_spec, templates_before = world.spec, templates(world.cluster)
        world.happen(event)
        for _ in range(steps):
            plan_ = world.step()
            for pool in Pool:
                old, new = before.pool(pool), plan_.pool(pool)
                assert old is not None
                assert new is not None
                may_change = (
                    old_spec.inputs(pool) != world.spec.inputs(pool)
                    or (pool is Pool.DECODE and old_spec.draft_max != world.spec.draft_max)
                    or (world.upgrade is not None and world.upgrade != taken)
                )
                assert may_change or old.current.revision == new.current.revision, (pool, event)
            assert len({p.current.target_revision for p in plan_.pools} - {None}) == 1
            for name, template in templates(world.cluster).items():
                assert templates_before.get(name, template) == template, "a template changed under its name"
            before, old_spec, taken = plan_, world.spec, world.upgrade or taken
    settle(world.cluster, world.spec.to_service(world.upgrade), version=world.version)
    assert len(world.cluster.pods("decode")) == world.spec.replicas
