"""The object store: what an API server promises about any object."""

from typing import Any

import pytest

from specserve_operator.cluster.local.store import Change, ChangeType, ObjectKey, ObjectStore
from specserve_operator.cluster.protocol import ApplyOutcome, ClusterError

Manifest = dict[str, Any]


def config_map(name: str = "settings", **data: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def service(name: str = "coder", **spec: Any) -> Manifest:
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": name},
        "spec": spec,
    }


def pod(name: str = "p", **spec: Any) -> Manifest:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def owned_by(owner: Manifest, obj: Manifest) -> Manifest:
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    obj["metadata"]["ownerReferences"] = [reference]
    return obj


def stored(store: ObjectStore, obj: Manifest) -> Manifest:
    found = store.get(ObjectKey.of(obj))
    assert found is not None
    return found


def test_create_fills_in_what_the_server_owns() -> None:
    store = ObjectStore()
    assert store.apply(service()) is ApplyOutcome.CREATED
    meta = stored(store, service())["metadata"]
    assert meta["namespace"] == "default"
    assert meta["generation"] == 1
    assert meta["resourceVersion"] == "1"
    assert len(meta["uid"]) == 36
    assert meta["creationTimestamp"].endswith("Z")


def test_apply_of_the_same_object_changes_nothing() -> None:
    store = ObjectStore()
    store.apply(config_map(a="1"))
    changes: list[Change] = []
    store.subscribe(changes.append)
    assert store.apply(config_map(a="1")) is ApplyOutcome.UNCHANGED
    assert changes == []
    assert store.resource_version == "1"


def test_changed_spec_is_a_new_generation_and_changed_labels_are_not() -> None:
    store = ObjectStore()
    store.apply(service(replicas=1))
    assert store.apply(service(replicas=2)) is ApplyOutcome.CONFIGURED
    assert stored(store, service())["metadata"]["generation"] == 2
    labelled = service(replicas=2)
    labelled["metadata"]["labels"] = {"a": "b"}
    assert store.apply(labelled) is ApplyOutcome.CONFIGURED
    assert stored(store, service())["metadata"]["generation"] == 2


def test_fields_left_out_of_an_apply_are_removed() -> None:
    store = ObjectStore()
    store.apply(config_map(a="1", b="2"))
    store.apply(config_map(a="1"))
    assert stored(store, config_map())["data"] == {"a": "1"}


def test_status_is_kept_over_apply_and_is_no_new_generation() -> None:
    store = ObjectStore()
    store.apply(service(replicas=1))
    assert store.patch_status(ObjectKey.of(service()), {"ready": True})
    assert stored(store, service())["metadata"]["generation"] == 1
    store.apply({**service(replicas=2), "status": {"ready": "forged"}})
    assert stored(store, service())["status"] == {"ready": True}


def test_status_patch_that_changes_nothing_is_silent() -> None:
    store = ObjectStore()
    store.apply(service())
    store.patch_status(ObjectKey.of(service()), {"ready": True})
    assert not store.patch_status(ObjectKey.of(service()), {"ready": True})
    assert not store.patch_status(ObjectKey("SpeculativeService", "default", "gone"), {})
    assert store.resource_version == "2"


def test_deleting_an_owner_deletes_what_it_owns_and_only_marks_pods() -> None:
    store = ObjectStore()
    store.apply(service())
    owner = stored(store, service())
    store.apply(owned_by(owner, config_map("child")))
    store.apply(owned_by(stored(store, config_map("child")), pod("grandchild", terminationGracePeriodSeconds=7)))
    store.apply(config_map("unrelated"))
    assert store.delete(ObjectKey.of(service()))
    assert {obj["metadata"]["name"] for obj in store} == {"grandchild", "unrelated"}
    meta = stored(store, pod("grandchild"))["metadata"]
    assert meta["deletionGracePeriodSeconds"] == 7
    assert "deletionTimestamp" in meta


def test_owner_recreated_under_the_same_name_is_another_owner() -> None:
    store = ObjectStore()
    store.apply(service())
    first = stored(store, service())
    store.delete(ObjectKey.of(service()))
    store.apply(service())
    store.apply(owned_by(first, config_map("late")))
    assert store.get(ObjectKey.of(config_map("late"))) is None


def test_object_with_one_of_two_owners_left_stays() -> None:
    store = ObjectStore()
    store.apply(service("a"))
    store.apply(service("b"))
    child = owned_by(stored(store, service("a")), config_map("child"))
    second = owned_by(stored(store, service("b")), config_map("x"))["metadata"]["ownerReferences"]
    child["metadata"]["ownerReferences"] += second
    store.apply(child)
    store.delete(ObjectKey.of(service("a")))
    assert store.get(ObjectKey.of(config_map("child"))) is not None
    store.delete(ObjectKey.of(service("b")))
    assert store.get(ObjectKey.of(config_map("child"))) is None


def test_listeners_see_every_change_with_rising_versions() -> None:
    store = ObjectStore()
    changes: list[Change] = []
    unsubscribe = store.subscribe(changes.append)
    store.apply(config_map(a="1"))
    store.apply(config_map(a="2"))
    store.delete(ObjectKey.of(config_map()))
    unsubscribe()
    store.apply(config_map("later"))
    assert [change.type for change in changes] == [ChangeType.ADDED, ChangeType.MODIFIED, ChangeType.DELETED]
    assert [change.obj["metadata"]["resourceVersion"] for change in changes] == ["1", "2", "3"]


def test_objects_handed_out_earlier_do_not_change() -> None:
    store = ObjectStore()
    store.apply(config_map(a="1"))
    before = stored(store, config_map())
    store.apply(config_map(a="2"))
    store.patch_status(ObjectKey.of(config_map()), {"x": 1})
    assert before["data"] == {"a": "1"}
    assert "status" not in before
    assert before["metadata"]["resourceVersion"] == "1"


def test_caller_may_change_what_it_applied() -> None:
    store = ObjectStore()
    mine = config_map(a="1")
    store.apply(mine)
    mine["data"]["a"] = "changed"
    assert stored(store, config_map())["data"] == {"a": "1"}


def test_list_selects_by_namespace_and_labels() -> None:
    store = ObjectStore()
    for namespace, name, role in (("x", "a", "decode"), ("x", "b", "prefill"), ("y", "c", "decode")):
        obj = config_map(name)
        obj["metadata"] |= {"namespace": namespace, "labels": {"role": role}}
        store.apply(obj)
    assert [o["metadata"]["name"] for o in store.list("ConfigMap")] == ["a", "b", "c"]
    assert [o["metadata"]["name"] for o in store.list("ConfigMap", "x", selector={"role": "decode"})] == ["a"]
    assert store.list("Secret") == []


@pytest.mark.parametrize(
    "broken", [{}, {"apiVersion": "v1", "kind": "Pod"}, {"apiVersion": "v1", "metadata": {"name": "x"}}]
)
def test_object_without_a_name_or_kind_is_refused(broken: Manifest) -> None:
    with pytest.raises(ClusterError, match="object without") as caught:
        ObjectStore().apply(broken)
    assert not caught.value.retryable


def test_persisted_objects_continue_their_versions() -> None:
    first = ObjectStore()
    first.apply(service(replicas=1))
    first.apply(service(replicas=2))
    second = ObjectStore(objects=list(first))
    assert second.apply(service(replicas=2)) is ApplyOutcome.UNCHANGED
    second.apply(service(replicas=3))
    meta = stored(second, service())["metadata"]
    assert (meta["generation"], meta["resourceVersion"]) == (3, "3")
