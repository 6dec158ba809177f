"""The cache of a cluster's objects: newest wins, whatever the order of arrival."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.cluster.kube.cache import ObjectCache
from specserve_operator.cluster.kube.kinds import POD, SERVICE, Kind
from specserve_operator.constants import LABEL_SERVICE
from specserve_operator.core.objects import Manifest, ObjectRef, ServiceKey

CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
KEY = ServiceKey("llm", "coder")


def child(version: int, *, name: str = "coder-runtime", service: str | None = "coder", **fields: Any) -> Manifest:
    labels = {} if service is None else {LABEL_SERVICE: service}
    meta = {"name": name, "namespace": "llm", "resourceVersion": str(version), "labels": labels}
    return {"metadata": meta, **fields}


def ref(name: str = "coder-runtime") -> ObjectRef:
    return ObjectRef("v1", "ConfigMap", "llm", name)


def test_an_object_is_found_by_name_and_by_service_with_its_kind() -> None:
    cache = ObjectCache()

    assert cache.put(CONFIG_MAP, child(5, data={"a": "1"})) == {KEY}

    assert cache.get(ref()) == {"apiVersion": "v1", "kind": "ConfigMap"} | child(5, data={"a": "1"})
    assert cache.owned(KEY) == [cache.get(ref())]
    assert cache.owned(ServiceKey("other", "coder")) == []


def test_an_older_state_does_not_replace_a_newer_one() -> None:
    cache = ObjectCache()
    cache.put(CONFIG_MAP, child(7, data={"a": "new"}))

    assert cache.put(CONFIG_MAP, child(6, data={"a": "old"})) == set()
    assert cache.put(CONFIG_MAP, child(7, data={"a": "same version"})) == set()

    found = cache.get(ref())
    assert found is not None
    assert found["data"] == {"a": "new"}


def test_a_late_answer_does_not_bring_back_what_was_deleted() -> None:
    cache = ObjectCache()
    cache.put(CONFIG_MAP, child(5))
    cache.discard(CONFIG_MAP, child(8))

    assert cache.put(CONFIG_MAP, child(6)) == set()

    assert cache.get(ref()) is None


def test_an_object_made_anew_outlives_the_late_word_of_its_deletion() -> None:
    cache = ObjectCache()
    cache.put(CONFIG_MAP, child(5))
    cache.put(CONFIG_MAP, child(9, data={"a": "second"}))

    assert cache.discard(CONFIG_MAP, child(7)) == set()

    found = cache.get(ref())
    assert found is not None
    assert found["data"] == {"a": "second"}


def test_a_list_removes_what_was_deleted_unseen_and_nothing_younger_than_itself() -> None:
    cache = ObjectCache()
    for name, version in (("gone", 3), ("there", 4), ("younger", 20)):
        cache.put(CONFIG_MAP, child(version, name=name))

    changed = cache.keep_only(CONFIG_MAP, None, listed=[ref("there")], version=10)

    assert changed == {KEY}
    assert [r.name for r in cache.refs(CONFIG_MAP)] == ["there", "younger"]


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    cache = ObjectCache()
    cache.put(CONFIG_MAP, child(3))

    assert cache.keep_only(CONFIG_MAP, "other", listed=[], version=10) == set()

    assert cache.get(ref()) is not None


def test_both_services_hear_of_an_object_that_changes_hands() -> None:
    cache = ObjectCache()
    cache.put(CONFIG_MAP, child(3))

    assert cache.put(CONFIG_MAP, child(4, service="other")) == {KEY, ServiceKey("llm", "other")}

    assert cache.owned(KEY) == []
    assert len(cache.owned(ServiceKey("llm", "other"))) == 1


def test_a_service_is_listed_and_is_none_of_its_own_children() -> None:
    cache = ObjectCache()

    cache.put(SERVICE, {"metadata": {"name": "coder", "namespace": "llm", "resourceVersion": "2"}, "spec": {}})

    assert cache.services() == [KEY]
    assert cache.owned(KEY) == []


def test_a_services_own_spec_and_status_are_no_change_but_another_one_under_its_name_is() -> None:
    cache = ObjectCache()
    meta = {"name": "coder", "namespace": "llm", "resourceVersion": "2", "uid": "first"}
    cache.put(SERVICE, {"metadata": meta, "spec": {}})
    before = cache.changes(KEY)

    status = {"status": {"observedGeneration": 1}}
    assert cache.put(SERVICE, {"metadata": meta | {"resourceVersion": "3"}, "spec": {}} | status) == {KEY}
    assert cache.changes(KEY) == before
    cache.put(SERVICE, {"metadata": meta | {"resourceVersion": "4", "uid": "second"}, "spec": {}})
    assert cache.changes(KEY) != before


def test_changes_count_what_the_service_owns_and_nothing_else() -> None:
    cache = ObjectCache()
    assert cache.changes(KEY) == 0
    cache.put(CONFIG_MAP, child(3))
    before = cache.changes(KEY)

    cache.put(CONFIG_MAP, child(4, name="x", service="other"))
    assert cache.changes(KEY) == before
    cache.put(CONFIG_MAP, child(3))
    assert cache.changes(KEY) == before
    cache.put(CONFIG_MAP, child(5))
    assert cache.changes(KEY) != before


def test_of_a_pod_only_what_tells_it_from_others_is_kept() -> None:
    cache = ObjectCache()
    status = {"phase": "Running", "podIP": "10.0.0.1", "hostIP": "10.0.0.9"}
    spec = {"nodeName": "node1", "containers": [{"name": "engine", "args": ["--long"] * 100}]}

    cache.put(POD, child(3, name="p", spec=spec, status=status))

    found = cache.get(ObjectRef("v1", "Pod", "llm", "p"))
    assert found is not None
    assert found["spec"] == {"nodeName": "node1"}
    assert found["status"] == {"phase": "Running", "podIP": "10.0.0.1"}


def test_managed_fields_are_not_kept() -> None:
    cache = ObjectCache()
    obj = child(3)
    obj["metadata"]["managedFields"] = [{"manager": "specserve"}]

    cache.put(CONFIG_MAP, obj)

    found = cache.get(ref())
    assert found is not None
    assert "managedFields" not in found["metadata"]


@given(st.permutations([(1, False), (2, False), (3, True), (4, False), (5, True)]), st.booleans())
def test_the_newest_word_counts_in_whatever_order_words_arrive(words: list[tuple[int, bool]], is_gone: bool) -> None:
    """Each word is a version and whether it was the deletion."""
    cache = ObjectCache()
    for version, is_deletion in words if is_gone else [w for w in words if w[0] < 5]:
        (cache.discard if is_deletion else cache.put)(CONFIG_MAP, child(version))

    assert (cache.get(ref()) is None) is is_gone
    assert cache.version(ref()) == (0 if is_gone else 4)
