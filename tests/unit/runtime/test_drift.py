"""Whether an object already is as it was rendered."""

from typing import Any

import pytest

from specserve_operator.runtime.drift import is_as_rendered

RENDERED: dict[str, Any] = {
    "kind": "Deployment",
    "metadata": {"name": "a", "labels": {"x": "1"}},
    "spec": {"replicas": 2, "containers": [{"name": "engine", "args": ["--a", "1"]}]},
}


def live(**changes: Any) -> dict[str, Any]:
    """As the cluster returns it: with defaults and a status."""
    obj: dict[str, Any] = {
        "kind": "Deployment",
        "metadata": {"name": "a", "labels": {"x": "1", "others": "y"}, "uid": "u", "resourceVersion": "7"},
        "spec": {
            "replicas": 2,
            "revisionHistoryLimit": 10,
            "containers": [{"name": "engine", "args": ["--a", "1"], "terminationMessagePath": "/dev/x"}],
        },
        "status": {"replicas": 1},
    }
    obj["spec"] |= changes
    return obj


def test_defaults_status_and_fields_of_others_are_no_drift() -> None:
    assert is_as_rendered(RENDERED, live())


def test_an_object_that_is_not_there_has_drifted() -> None:
    assert not is_as_rendered(RENDERED, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"replicas": 3},
        {"replicas": None},
        {"containers": []},
        {"containers": [{"name": "engine", "args": ["--a", "1", "--b"]}]},
        {"containers": [{"name": "engine", "args": ["--a", "2"]}]},
        {"containers": "engine"},
    ],
)
def test_a_changed_field_is_drift(changes: dict[str, Any]) -> None:
    assert not is_as_rendered(RENDERED, live(**changes))
