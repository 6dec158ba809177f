"""The status while the spec is invalid: says so, goes on to count pods, and claims nothing of the new generation."""

from specserve_operator.api.conditions import ConditionType
from tests.unit.core.builders import disaggregated, pods_of, ready_children, set_ready
from tests.unit.core.statuses import condition, status_of, verdict

INVALID = {"generation": 2, "model": {"uri": "s3://bucket/x"}}


def test_an_invalid_spec_is_reported_and_what_runs_stays_shown() -> None:
    children = ready_children(disaggregated())
    good = status_of({}, children)
    bad = status_of(INVALID, children, previous=good)
    assert verdict(bad, "Ready") == ("False", "InvalidSpec")
    assert condition(bad, "Ready")["message"].startswith("spec.model.uri: s3:// is not supported")
    assert bad["observedGeneration"] == 2
    assert bad["pools"] == good["pools"]
    assert verdict(bad, "DecodeReady") == ("True", "PodsReady")


def test_an_invalid_spec_of_a_new_service_has_all_conditions() -> None:
    status = status_of({"model": {"uri": "s3://bucket/x"}}, [])
    assert {c["type"] for c in status["conditions"]} == {str(t) for t in ConditionType}
    assert verdict(status, "DecodeReady") == ("Unknown", "Pending")


def test_the_other_conditions_go_on_to_speak_of_the_generation_they_were_judged_by() -> None:
    children = ready_children(disaggregated())
    good = status_of({}, children)
    bad = status_of(INVALID, children, previous=good)
    assert condition(bad, "Ready")["observedGeneration"] == 2
    assert condition(bad, "DecodeReady") == condition(good, "DecodeReady")
    assert condition(bad, "DecodeReady")["observedGeneration"] == 1


def test_pods_are_counted_while_the_spec_is_invalid() -> None:
    children = ready_children(disaggregated())
    good = status_of({}, children)
    decode = pods_of(children, "decode")
    set_ready(decode[0], False)
    children.remove(decode[1])
    bad = status_of(INVALID, children, previous=good)
    (before,), (pool,) = ([p for p in s["pools"] if p["name"] == "decode"] for s in (good, bad))
    assert (before["ready"], before["replicas"], before["updated"]) == (2, 2, 2)
    assert (pool["ready"], pool["replicas"], pool["updated"], pool["desired"]) == (0, 1, 1, 2)
    assert (bad["columns"]["decode"], bad["columns"]["prefill"]) == ("0/2", good["columns"]["prefill"])
