"""Which pods a Deployment makes and deletes."""

import asyncio
from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.cluster.local.deployments import (
    TEMPLATE_HASH,
    DeploymentController,
    plan_pods,
    render_deployment_status,
    render_pod,
    template_hash,
)
from specserve_operator.cluster.local.events import EventRecorder
from specserve_operator.cluster.local.store import ObjectKey, ObjectStore

Manifest = dict[str, Any]
NOW = "2026-01-01T00:00:00Z"


def deployment(replicas: int = 2, *, argument: str = "x") -> Manifest:
    labels = {"app": "coder"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "coder-decode-r1", "namespace": "default", "uid": "d", "generation": 1},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {"note": "kept"}},
                "spec": {"containers": [{"name": "engine", "command": [argument]}]},
            },
        },
    }


def pod(
    name: str, *, created: str = NOW, ready: bool = False, ending: bool = False, owner: Manifest | None = None
) -> Manifest:
    made = deepcopy(render_pod(owner or deployment(), name))
    made["metadata"] |= {"name": name, "uid": name, "creationTimestamp": created}
    if ending:
        made["metadata"]["deletionTimestamp"] = NOW
    if ready:
        made["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    return made


def test_missing_pods_are_created() -> None:
    plan = plan_pods(deployment(3), [pod("a")])
    assert (plan.create, plan.delete) == (2, ())


def test_pods_that_end_are_replaced_at_once() -> None:
    assert plan_pods(deployment(1), [pod("a", ready=True, ending=True)]).create == 1


def test_scaling_down_takes_unready_pods_first_then_the_newest() -> None:
    pods = [
        pod("old-ready", created="2026-01-01T00:00:00Z", ready=True),
        pod("new-ready", created="2026-01-01T00:00:09Z", ready=True),
        pod("old-unready", created="2026-01-01T00:00:00Z"),
    ]
    assert plan_pods(deployment(2), pods).delete == ("old-unready",)
    assert set(plan_pods(deployment(1), pods).delete) == {"old-unready", "new-ready"}


@given(wanted=st.integers(0, 8), ready=st.lists(st.booleans(), max_size=8))
def test_plan_always_leads_to_the_wanted_number(wanted: int, ready: list[bool]) -> None:
    pods = [pod(f"p{i}", ready=r) for i, r in enumerate(ready)]
    plan = plan_pods(deployment(wanted), pods)
    assert len(pods) + plan.create - len(plan.delete) == wanted
    assert plan.create == 0 or plan.delete == ()


def test_changed_template_replaces_all_pods_after_they_are_gone() -> None:
    changed = deployment(2, argument="y")
    plan = plan_pods(changed, [pod("a"), pod("b", ending=True)])
    assert (plan.create, plan.delete) == (0, ("a",))
    assert plan_pods(changed, []).create == 2


def test_pod_carries_what_the_template_says_and_who_owns_it() -> None:
    made = render_pod(deployment(), "abcde")
    meta = made["metadata"]
    assert meta["name"] == "coder-decode-r1-abcde"
    assert meta["labels"] == {"app": "coder", TEMPLATE_HASH: template_hash(deployment())}
    assert meta["annotations"] == {"note": "kept"}
    assert meta["ownerReferences"][0]["uid"] == "d"
    assert made["spec"]["containers"][0]["command"] == ["x"]
    assert made["spec"]["restartPolicy"] == "Always"


def test_status_counts_and_leaves_out_what_is_zero() -> None:
    status = render_deployment_status(deployment(2), [pod("a", ready=True), pod("b"), pod("c", ending=True)], now=NOW)
    available = status.pop("conditions")[0]
    assert status == {
        "observedGeneration": 1,
        "replicas": 2,
        "updatedReplicas": 2,
        "readyReplicas": 1,
        "availableReplicas": 1,
        "unavailableReplicas": 1,
    }
    assert (available["type"], available["status"]) == ("Available", "False")
    empty = render_deployment_status(deployment(0), [], now=NOW)
    assert empty.keys() == {"observedGeneration", "conditions"}


def reconcile(store: ObjectStore) -> None:
    controller = DeploymentController(store, EventRecorder(store))
    asyncio.run(controller.reconcile(ObjectKey("Deployment", "default", "coder-decode-r1")))


def test_controller_makes_pods_and_writes_the_status() -> None:
    store = ObjectStore()
    store.apply(deployment(2))
    reconcile(store)
    names = [p["metadata"]["name"] for p in store.list("Pod")]
    assert len(set(names)) == 2
    assert all(name.startswith("coder-decode-r1-") and len(name.rpartition("-")[2]) == 5 for name in names)
    stored = store.list("Deployment")[0]
    assert stored["status"]["replicas"] == 2
    assert {e["reason"] for e in store.list("Event")} == {"SuccessfulCreate"}
    version = store.resource_version
    reconcile(store)
    assert store.resource_version == version


def test_controller_leaves_pods_of_another_owner_alone() -> None:
    store = ObjectStore()
    store.apply(deployment(1))
    foreign = render_pod(deployment(), "zzzzz")
    del foreign["metadata"]["ownerReferences"]
    store.apply(foreign)
    reconcile(store)
    assert len(store.list("Pod")) == 2


def test_deleted_deployment_takes_its_pods_along() -> None:
    store = ObjectStore()
    store.apply(deployment(2))
    reconcile(store)
    store.delete(ObjectKey("Deployment", "default", "coder-decode-r1"))
    assert all("deletionTimestamp" in p["metadata"] for p in store.list("Pod"))
