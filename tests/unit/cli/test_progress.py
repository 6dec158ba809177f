"""What `up` says while it waits, and when it gives up."""

from typing import Any

from specserve_operator.cli.progress import (
    View,
    describe_changes,
    find_failure,
    find_obstacle,
    is_ready,
    worst_pod,
)


def pod(name: str, *, ready: bool = False, restarts: int = 0, pool: str = "decode", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"specserve.dev/pool": pool}},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"restartCount": restarts, "ready": ready, "state": {"running": {}}}],
            **status,
        },
    }


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def service(*conditions: dict[str, Any], generation: int = 1, observed: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"name": "tiny", "generation": generation},
        "status": {"observedGeneration": observed, "conditions": list(conditions)},
    }


def test_a_pod_is_reported_when_it_comes_changes_and_goes() -> None:
    starting, ready = View(pods=[pod("a")]), View(pods=[pod("a", ready=True)])
    assert describe_changes(View(), starting) == ["pod/a: Running, not ready"]
    assert describe_changes(starting, ready) == ["pod/a: Ready"]
    assert describe_changes(ready, ready) == []
    assert describe_changes(ready, View()) == ["pod/a: gone"]


def test_a_restart_is_reported_though_the_pod_looks_as_before() -> None:
    before, after = View(pods=[pod("a", ready=True)]), View(pods=[pod("a", ready=True, restarts=1)])
    assert describe_changes(before, after) == ["pod/a: Ready (restarts: 1)"]


def test_a_condition_is_reported_when_status_or_reason_change_not_when_the_message_does() -> None:
    first = View(service(condition("DecodeReady", "False", "PodsNotReady", "0 of 2")))
    other_text = View(service(condition("DecodeReady", "False", "PodsNotReady", "1 of 2")))
    ready = View(service(condition("DecodeReady", "True", "PodsReady")))
    assert describe_changes(View(), first) == ["service/tiny: DecodeReady=False (PodsNotReady): 0 of 2"]
    assert describe_changes(first, other_text) == []
    assert describe_changes(other_text, ready) == ["service/tiny: DecodeReady=True (PodsReady)"]


def test_what_nobody_waits_for_is_no_news() -> None:
    view = View(
        service(
            condition("TrainingReady", "True", "NotConfigured"),
            condition("KVTransferReady", "Unknown", "NoTraffic"),
            condition("Progressing", "True", "RolloutInProgress"),
            condition("Ready", "False", "PodsNotReady", "repeats its first part"),
        )
    )
    assert describe_changes(View(), view) == []


def test_an_invalid_spec_is_news_though_it_is_only_in_the_summary() -> None:
    view = View(service(condition("Ready", "False", "InvalidSpec", "spec.x: no")))
    assert describe_changes(View(), view) == ["service/tiny: Ready=False (InvalidSpec): spec.x: no"]


def test_ready_counts_only_for_the_stored_generation() -> None:
    ready = condition("Ready", "True", "AllPoolsReady")
    assert is_ready(service(ready))
    assert not is_ready(service(ready, generation=2, observed=1))
    assert not is_ready(service())
    assert not is_ready(None)


def test_an_invalid_spec_is_hopeless_at_once() -> None:
    failure = find_failure(View(service(condition("Ready", "False", "InvalidSpec", "spec.engine.args: no"))))
    assert failure is not None
    assert (failure.condition, failure.reason, failure.message) == ("Ready", "InvalidSpec", "spec.engine.args: no")
    assert failure.pod is None


def test_one_crash_is_no_failure_but_two_are_and_the_crashing_pod_is_named() -> None:
    crashing = service(condition("DecodeReady", "False", "CrashLooping"))
    once = View(crashing, [pod("a", restarts=1), pod("b", ready=True)])
    twice = View(crashing, [pod("a", restarts=2), pod("b", ready=True)])
    assert find_failure(once) is None
    failure = find_failure(twice)
    assert failure is not None
    assert failure.pod == "a"


def test_the_pod_that_the_condition_names_is_the_one_whose_log_is_shown() -> None:
    broken = service(condition("DecodeReady", "False", "ModelLoadFailed", "pod b: no weights"))
    failure = find_failure(View(broken, [pod("a", restarts=5), pod("b")]))
    assert failure is not None
    assert failure.pod == "b"


def test_a_pod_of_the_failing_pool_is_blamed_rather_than_one_that_waits_for_it() -> None:
    view = View(
        service(condition("Ready", "False", "CrashLooping"), condition("PrefillReady", "False", "CrashLooping")),
        [pod("d", restarts=9), pod("p", restarts=2, pool="prefill")],
    )
    failure = find_failure(view)
    assert failure is not None
    assert (failure.condition, failure.pod) == ("PrefillReady", "p")


def test_waiting_pods_are_no_failure() -> None:
    assert find_failure(View(service(condition("DecodeReady", "False", "PodsNotReady")), [pod("a")])) is None


def test_the_obstacle_is_the_failing_part_rather_than_the_summary() -> None:
    view = View(service(condition("Ready", "False", "PodsNotReady"), condition("DecodeReady", "False", "PodsNotReady")))
    obstacle = find_obstacle(view)
    assert obstacle is not None
    assert obstacle.condition == "DecodeReady"
    assert find_obstacle(View()) is None


def test_a_pod_that_is_on_its_way_out_is_not_to_blame() -> None:
    leaving = pod("old", restarts=9)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    assert worst_pod([leaving, pod("new")]) == "new"
    assert worst_pod([pod("fine", ready=True)]) is None


def test_a_failure_of_the_spec_before_is_no_failure() -> None:
    stale = service(condition("Ready", "False", "InvalidSpec", "spec.x: no"), generation=2, observed=1)
    assert find_failure(View(stale)) is None


def test_only_restarts_of_the_failing_pools_wanted_revision_count() -> None:
    crashing = service(condition("DecodeReady", "False", "CrashLooping"))
    crashing["status"]["pools"] = [{"name": "decode", "revision": "r2"}]
    old, new, other = pod("old", restarts=9), pod("new", restarts=1), pod("p", restarts=9, pool="prefill")
    old["metadata"]["labels"]["specserve.dev/revision"] = "r1"
    new["metadata"]["labels"]["specserve.dev/revision"] = "r2"
    assert find_failure(View(crashing, [old, new, other])) is None
    new["status"]["containerStatuses"][0]["restartCount"] = 2
    assert find_failure(View(crashing, [old, new, other])) is not None
