"""The reconciler's steps against a cluster that is a dict."""

import asyncio

import pytest

from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError
from specserve_operator.constants import FIELD_MANAGER
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest, ServiceKey
from specserve_operator.runtime.reconciler import Reconciler
from tests.fakes.clock import settle
from tests.unit.runtime.reconciling import CONFIG, World, condition, make_service


async def test_the_first_pass_applies_everything_and_writes_a_status() -> None:
    world = World()
    key = world.cluster.put(make_service(prefill={"replicas": 1}))
    await world.reconciler.reconcile(key)
    pools = [world.deployment(pool)["spec"]["replicas"] for pool in ("prefill", "decode", "gateway")]
    assert pools == [1, 2, 1]
    assert "tiny-runtime" in world.named("ConfigMap")
    assert "tiny-gateway" in world.named("Service")
    assert condition(world.cluster.services[key], "Ready")["status"] != "True"
    assert world.cluster.services[key]["status"]["observedGeneration"] == 1
    assert world.stats.hastened == 1


async def test_a_pass_over_what_has_not_changed_writes_nothing() -> None:
    world = World()
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    await world.reconciler.reconcile(key)  # the first look at what the first pass has made
    applied, writes, events = len(world.cluster.applied), world.cluster.status_writes, len(world.cluster.events)
    await world.reconciler.reconcile(key)
    assert (len(world.cluster.applied), world.cluster.status_writes) == (applied, writes)
    assert len(world.cluster.events) == events
    assert world.stats.hastened == 1


async def test_drift_is_repaired() -> None:
    world = World()
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    deployment = world.deployment("decode")
    deployment["spec"]["replicas"] = 7
    await world.reconciler.reconcile(key)
    assert world.deployment("decode")["spec"]["replicas"] == 2
    gone = next(ref for ref in world.cluster.objects if ref.kind == "ConfigMap")
    del world.cluster.objects[gone]
    await world.reconciler.reconcile(key)
    assert gone in world.cluster.objects


async def test_labels_and_annotations_of_others_are_left_alone_and_cause_no_writes() -> None:
    world = World()
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    for obj in world.cluster.objects.values():
        obj["metadata"]["labels"]["team"] = "search"
        obj["metadata"].setdefault("annotations", {})["deployment.kubernetes.io/revision"] = "1"
    await world.reconciler.reconcile(key)
    applied = len(world.cluster.applied)
    await world.reconciler.reconcile(key)
    assert len(world.cluster.applied) == applied
    assert world.deployment("decode")["metadata"]["labels"]["team"] == "search"


async def test_a_restarted_control_plane_with_other_images_restarts_no_pod() -> None:
    world = World()
    key = world.cluster.put(make_service(prefill={"replicas": 1}))
    await world.reconciler.reconcile(key)
    before = {pool: world.deployment(pool)["spec"]["template"] for pool in ("prefill", "decode", "gateway")}
    newer = OperatorConfig("engine:2", "gateway:2", "2", local=True)
    reconciler = Reconciler(world.cluster, newer, world.stats, world.clock)
    for _ in range(3):
        await reconciler.reconcile(key)
    assert {pool: world.deployment(pool)["spec"]["template"] for pool in before} == before
    upgrade = condition(world.cluster.services[key], "UpgradeAvailable")
    assert (upgrade["status"], upgrade["reason"]) == ("True", "NewerRevision")
    assert len(world.named("ControllerRevision")) == 1


async def test_outdated_crds_are_told_of_until_they_are_not() -> None:
    world = World()
    key = world.cluster.put(make_service())
    world.reconciler.crd_problem = "the installed CRDs are older than the operator and lack SpeculativeService.spec.x"
    await world.reconciler.reconcile(key)
    assert condition(world.cluster.services[key], "UpgradeAvailable")["reason"] == "CRDOutdated"
    world.reconciler.crd_problem = ""
    await world.reconciler.reconcile(key)
    assert condition(world.cluster.services[key], "UpgradeAvailable")["reason"] == "UpToDate"


async def test_a_service_gets_ready_when_its_pods_are_and_an_event_says_so_once() -> None:
    world = World()
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    world.bring_up(key)
    await world.reconciler.reconcile(key)
    await world.reconciler.reconcile(key)
    assert condition(world.cluster.services[key], "Ready")["status"] == "True"
    assert [e.reason for _, e in world.cluster.events].count("ServiceReady") == 1


async def test_an_event_that_is_refused_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    key = world.cluster.put(make_service())
    world.cluster.fail_next("emit", ClusterError("the namespace has no room for more events"))

    await world.reconciler.reconcile(key)

    assert condition(world.cluster.services[key], "Progressing")["reason"] == "RolloutInProgress"
    assert "RolloutStarted was not recorded: the namespace has no room for more events" in caplog.text
    assert world.cluster.events == []


async def test_an_unreadable_spec_becomes_a_condition_and_is_not_tried_again() -> None:
    world = World()
    key = world.cluster.put(make_service(decode={"replicas": 2, "scaling": {"maxReplicas": 3}}))
    assert await world.reconciler.reconcile(key) is None
    assert await world.reconciler.reconcile(key) is None
    ready = condition(world.cluster.services[key], "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert "replicas and scaling" in ready["message"]
    assert world.cluster.services[key]["status"]["observedGeneration"] == 1
    assert world.cluster.status_writes == 1
    assert [e.reason for _, e in world.cluster.events] == ["InvalidSpec"]


async def test_an_unreadable_new_generation_leaves_running_pods_alone() -> None:
    world = World()
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    before = dict(world.cluster.objects)
    world.cluster.put(make_service(decode={"replicas": "many"}))
    await world.reconciler.reconcile(key)
    assert world.cluster.objects == before
    assert condition(world.cluster.services[key], "Ready")["observedGeneration"] == 2
    assert world.cluster.services[key]["status"]["pools"]


async def test_a_service_that_is_gone_or_going_is_left_alone() -> None:
    world = World()
    key = world.cluster.put(make_service())
    world.cluster.services[key]["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    assert await world.reconciler.reconcile(key) is None
    world.cluster.remove(key)
    assert await world.reconciler.reconcile(key) is None
    assert world.cluster.applied == []
    assert world.cluster.status_writes == 0


async def test_one_object_that_cannot_be_applied_does_not_keep_others_or_the_status_from_being_written() -> None:
    world = World()
    key = world.cluster.put(make_service())
    world.cluster.fail_next("apply", ClusterError("quota exceeded"))
    with pytest.raises(ClusterError, match="quota exceeded"):
        await world.reconciler.reconcile(key)
    assert len(world.named("Deployment")) == 2
    assert world.cluster.status_writes == 1
    assert [e.message for _, e in world.cluster.events if e.reason == "ApplyFailed"] == ["quota exceeded"]


async def test_a_service_that_cannot_be_reached_is_not_ready_until_its_entrance_is_applied() -> None:
    world = World()
    key = world.cluster.put(make_service())
    await world.reconciler.reconcile(key)
    world.bring_up(key)
    entrance = next(ref for ref in world.cluster.objects if ref.kind == "Service" and ref.name == "tiny-gateway")
    del world.cluster.objects[entrance]
    world.cluster.fail_next("apply", ClusterError("port 80 is taken"))
    with pytest.raises(ClusterError, match="port 80 is taken"):
        await world.reconciler.reconcile(key)
    for kind in ("Ready", "GatewayReady"):
        found = condition(world.cluster.services[key], kind)
        assert (found["status"], found["reason"]) == ("False", "ApplyFailed")
        assert "port 80 is taken" in found["message"]
    await world.reconciler.reconcile(key)
    assert condition(world.cluster.services[key], "Ready")["status"] == "True"


async def test_nothing_is_deleted_while_a_workload_cannot_be_applied() -> None:
    world = World()
    key = world.cluster.put(make_service(prefill={"replicas": 1}))
    await world.reconciler.reconcile(key)
    world.cluster.put(make_service())
    world.cluster.refused_kinds = {"Deployment"}
    with pytest.raises(ClusterError):
        await world.reconciler.reconcile(key)
    assert world.cluster.deleted == []
    world.cluster.refused_kinds = set()
    await world.reconciler.reconcile(key)
    assert any(ref.kind == "Deployment" and ref.name.startswith("tiny-prefill-") for ref in world.cluster.deleted)


async def test_a_pool_that_left_the_spec_goes_though_something_else_is_refused() -> None:
    world = World()
    key = world.cluster.put(make_service(prefill={"replicas": 1}))
    await world.reconciler.reconcile(key)
    world.cluster.put(make_service())
    world.cluster.refused_kinds = {"ConfigMap", "ControllerRevision", "Service"}
    with pytest.raises(ClusterError):
        await world.reconciler.reconcile(key)
    assert any(ref.kind == "Deployment" and ref.name.startswith("tiny-prefill-") for ref in world.cluster.deleted)


async def test_a_running_reconciler_takes_changes_from_the_watch() -> None:
    world = World()
    async with world.running():
        world.cluster.put(make_service())
        await settle()
        assert len(world.named("Deployment")) == 2


async def test_services_that_were_there_before_are_taken_at_the_start() -> None:
    world = World()
    key = world.cluster.put(make_service())
    async for first in world.cluster.watch():  # somebody else has seen the change
        assert first == key
        break
    async with world.running():
        assert len(world.named("Deployment")) == 2


async def test_what_pods_refer_to_is_applied_before_what_makes_them_each_of_them_at_once() -> None:
    world = World()
    key = world.cluster.put(make_service())
    started, apply, gate = list[str](), world.cluster.apply, asyncio.Event()

    async def apply_slowly(obj: Manifest, *, field_manager: str = FIELD_MANAGER) -> ApplyOutcome:
        started.append(obj["kind"])
        await gate.wait()
        return await apply(obj, field_manager=field_manager)

    world.cluster.apply = apply_slowly  # type: ignore[method-assign]
    step = asyncio.ensure_future(world.reconciler.reconcile(key))
    await settle()
    assert {"ConfigMap", "ServiceAccount", "ControllerRevision"} <= set(started)
    assert "Deployment" not in started

    gate.set()
    await step
    assert started[-2:] == ["Deployment", "Deployment"]


async def test_others_get_their_turn_between_steps_that_change_nothing() -> None:
    world = World(workers=4)
    for number in range(40):
        world.cluster.put(make_service(f"service-{number}"))
    async with world.running():
        while world.cluster.status_writes < 40:
            await settle()
        await settle()
        await world.reconciler.reconfigure(CONFIG)
        assert len(world.reconciler.queue) == 40

        turns = 0
        while len(world.reconciler.queue):
            await asyncio.sleep(0)
            turns += 1

        assert turns >= 10


async def test_drift_that_nobody_reports_is_found_by_the_resync() -> None:
    world = World(resync_seconds=300.0)
    world.cluster.put(make_service())
    async with world.running():
        world.deployment("decode")["spec"]["replicas"] = 7
        world.clock.advance(299.0)
        await settle()
        assert world.deployment("decode")["spec"]["replicas"] == 7
        world.clock.advance(2.0)
        await settle()
        # Each service has its turn in the half of a period that follows.
        world.clock.advance(150.0)
        await settle()
        assert world.deployment("decode")["spec"]["replicas"] == 2


async def test_a_failing_cluster_is_tried_again_with_growing_delays() -> None:
    world = World()
    for _ in range(3):
        world.cluster.fail_next("get_service")
    world.cluster.put(make_service())
    async with world.running():
        for delay in (0.1, 0.2):
            world.clock.advance(delay)
            await settle()
            assert world.named("Deployment") == []
        world.clock.advance(0.4)
        await settle()
        assert len(world.named("Deployment")) == 2


async def test_a_refusal_is_tried_again_slowly() -> None:
    world = World(refused_retry_seconds=60.0)
    world.cluster.fail_next("get_service", ClusterError("may not get services", retryable=False))
    world.cluster.put(make_service())
    async with world.running():
        world.clock.advance(59.0)
        await settle()
        assert world.named("Deployment") == []
        world.clock.advance(2.0)
        await settle()
        assert len(world.named("Deployment")) == 2


async def test_a_fault_of_the_program_with_one_service_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(workers=1)
    world.cluster.fail_next("get_service", RuntimeError("a bug"))
    world.cluster.put(make_service("first"))
    world.cluster.put(make_service("second"))
    async with world.running():
        assert all(name.startswith("second") for name in world.named("Deployment"))
        assert "a bug" in caplog.text
        world.clock.advance(0.1)
        await settle()
        assert any(name.startswith("first") for name in world.named("Deployment"))


async def test_a_stuck_worker_does_not_keep_the_end_from_coming() -> None:
    world = World(drain_seconds=0.05)

    async def hang(key: ServiceKey) -> Manifest | None:
        await asyncio.Event().wait()
        return None

    world.cluster.get_service = hang  # type: ignore[method-assign]
    world.cluster.put(make_service())
    async with world.running():
        pass
