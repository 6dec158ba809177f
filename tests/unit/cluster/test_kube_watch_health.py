"""When a watch counts as deaf, and what is ours of a live object."""

from specserve_operator.cluster.kube.drift import digest_of_owned, owned_values
from specserve_operator.cluster.kube.health import WatchHealth
from specserve_operator.cluster.kube.kinds import POD, POD_MONITOR, SERVICE
from specserve_operator.core.objects import Manifest


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def seen(version: int, namespace: str = "a") -> Manifest:
    return {"metadata": {"name": "x", "namespace": namespace, "resourceVersion": str(version)}}


def test_a_watch_that_shows_what_a_list_shows_is_in_step() -> None:
    health = WatchHealth(Time())
    health.on_event(POD, seen(10))

    health.on_listed(POD, None, 10)

    assert health.behind_seconds() == 0


def test_an_empty_list_asks_nothing_of_a_watch() -> None:
    health = WatchHealth(Time())

    health.on_listed(POD, None, 0)

    assert health.behind_seconds() == 0


def test_a_watch_is_behind_from_the_list_on_that_showed_more_until_it_shows_it_too() -> None:
    time = Time()
    health = WatchHealth(time)
    health.on_event(POD, seen(10))
    health.on_listed(POD, None, 12)
    time.now += 50
    health.on_listed(POD, None, 15)

    assert health.behind_seconds() == 50
    assert health.watches_behind() == ["pods"]

    health.on_event(POD, seen(11))
    assert health.behind_seconds() == 50
    health.on_event(POD, seen(12))
    assert health.behind_seconds() == 0


def test_events_of_another_kind_prove_nothing() -> None:
    time = Time()
    health = WatchHealth(time)
    health.on_listed(POD, None, 12)
    time.now += 5

    health.on_event(SERVICE, seen(99))

    assert health.behind_seconds() == 5


def test_a_busy_namespace_does_not_hide_that_the_watch_of_another_one_is_deaf() -> None:
    time = Time()
    health = WatchHealth(time, namespaces=("a", "b"))
    health.on_listed(POD, "a", 12)
    time.now += 400
    health.on_event(POD, seen(99, "b"))
    health.on_listed(POD, "a", 13)
    health.on_listed(POD, "b", 99)

    assert health.behind_seconds() == 400
    assert health.watches_behind() == ["pods in a"]

    health.on_event(POD, seen(13, "a"))
    assert health.behind_seconds() == 0


def test_one_watch_of_the_whole_cluster_shows_objects_of_every_namespace() -> None:
    health = WatchHealth(Time())
    health.on_listed(POD, None, 12)

    health.on_event(POD, seen(12, "b"))

    assert health.watches_behind() == []


def test_a_kind_that_has_no_watch_is_never_behind() -> None:
    health = WatchHealth(Time())

    health.on_listed(POD_MONITOR, None, 12)

    assert health.watches_behind() == []


RENDERED = {"spec": {"replicas": 2, "limits": {"cpu": "1000m"}, "args": ["a", "b"], "ports": [{"port": 80}]}}


def live(**changes: object) -> Manifest:
    spec = {"replicas": 2, "limits": {"cpu": "1"}, "args": ["a", "b"], "ports": [{"port": 80, "protocol": "TCP"}]}
    return {"spec": spec | {"paused": False} | changes, "status": {"replicas": 2}}


def test_only_values_that_are_rendered_are_ours() -> None:
    assert owned_values(RENDERED, live()) == {
        "spec": {"replicas": 2, "limits": {"cpu": "1"}, "args": ["a", "b"], "ports": [{"port": 80}]}
    }


def test_a_foreign_field_changes_nothing_and_every_owned_one_does() -> None:
    before = digest_of_owned(RENDERED, live())

    assert digest_of_owned(RENDERED, live(paused=True)) == before
    assert digest_of_owned(RENDERED, live() | {"status": {}}) == before
    for changes in ({"replicas": 3}, {"limits": {}}, {"args": ["a"]}, {"ports": [{"port": 81}]}):
        assert digest_of_owned(RENDERED, live(**changes)) != before


def test_a_watch_that_begins_owes_nothing_of_what_was_before() -> None:
    time = Time()
    health = WatchHealth(time)
    health.on_watch(POD, None, 20)
    health.on_listed(POD, None, 18)
    time.now += 100.0
    assert health.behind_seconds() == 0.0
    health.on_listed(POD, None, 21)
    time.now += 5.0
    assert health.behind_seconds() == 5.0
    health.on_watch(POD, None, 30)  # it was begun anew
    assert health.behind_seconds() == 0.0
