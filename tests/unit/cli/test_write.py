"""What the write commands send, and what they refuse."""

from typing import Any

import pytest

from specserve_operator.cli.errors import CliError
from specserve_operator.cli.server import BadRequest, with_replicas
from specserve_operator.cli.write import delete, parse_replicas

SERVICE = {
    "metadata": {"name": "tiny"},
    "spec": {"prefill": {"replicas": 1, "args": ["-x"]}, "decode": {"scaling": {"maxReplicas": 4}}},
}


def test_assignments_become_replicas() -> None:
    assert parse_replicas(["decode=3", "prefill=0"]) == {"decode": 3, "prefill": 0}


@pytest.mark.parametrize("text", ["decode", "decode=", "=3", "decode=two", "decode=-1", "decode=1.5", "decode=²"])
def test_what_is_no_assignment_is_bad_usage(text: str) -> None:
    with pytest.raises(CliError, match="write POOL=REPLICAS") as caught:
        parse_replicas([text])
    assert caught.value.exit_code == 2


def test_a_pool_cannot_be_scaled_twice_at_once() -> None:
    with pytest.raises(CliError, match="decode is there twice"):
        parse_replicas(["decode=1", "decode=2"])


def test_scaling_changes_only_the_replicas_and_leaves_the_original_alone() -> None:
    scaled = with_replicas(SERVICE, {"prefill": 5, "gateway": 2})
    assert scaled["spec"]["prefill"] == {"replicas": 5, "args": ["-x"]}
    assert scaled["spec"]["gateway"] == {"replicas": 2}
    assert SERVICE["spec"]["prefill"]["replicas"] == 1


@pytest.mark.parametrize(
    ("service", "pool", "message"),
    [
        (SERVICE, "training", "training is no pool that can be scaled"),
        (SERVICE, "decode", r"spec\.decode\.scaling decides the replicas of service tiny"),
        ({"metadata": {"name": "s"}, "spec": {}}, "prefill", "service s has no prefill pool"),
    ],
)
def test_pools_whose_size_is_not_the_users_are_refused(service: dict[str, Any], pool: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        with_replicas(service, {pool: 1})


class StubClient:
    def __init__(self, gone: bool) -> None:
        self.gone = gone

    def delete(self, key: object, *, wait_seconds: float) -> bool:
        return self.gone


def test_delete_waits_until_the_pods_are_gone_or_says_that_they_are_not() -> None:
    gone: Any = StubClient(True)
    assert delete(gone, "tiny", None, namespace="default", timeout_seconds=5) == ["speculativeservice/tiny deleted"]
    lasting: Any = StubClient(False)
    with pytest.raises(CliError, match="pods have not ended within 5 s"):
        delete(lasting, "tiny", None, namespace="default", timeout_seconds=5)


def test_delete_takes_either_a_name_or_a_file() -> None:
    client: Any = StubClient(True)
    with pytest.raises(CliError, match="either the NAME"):
        delete(client, None, None, namespace="default", timeout_seconds=5)


def test_delete_with_no_time_to_wait_ends_with_success_once_the_deletion_is_accepted() -> None:
    lasting: Any = StubClient(False)
    lines = delete(lasting, "tiny", None, namespace="default", timeout_seconds=0)
    assert lines == ["speculativeservice/tiny deleted"]
