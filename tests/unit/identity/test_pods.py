"""Which pods may have certificates."""

from copy import deepcopy
from typing import Any

import pytest

from specserve_operator.identity.names import FLAG_IDENTITY_SERVER, PodId
from specserve_operator.identity.pods import PodRefusedError, certified_pod_id, certified_revisions
from specserve_operator.identity.tokens import PodClaims
from tests.unit.identity.builders import DECODE

SERVICE = {"metadata": {"name": "coder", "namespace": "llm", "uid": "service-uid"}}
CLAIMS = PodClaims("llm", "coder-decode-0a1b-x7f2k-9qzzz", DECODE.uid, "default")
LABELS = {"specserve.dev/service": "coder", "specserve.dev/pool": "decode", "specserve.dev/revision": "0a1b"}


def make_pod(**changes: Any) -> dict[str, Any]:
    """As the cluster makes it for the Deployment below; `changes` replace parts of its metadata."""
    owner = {"kind": "ReplicaSet", "name": "coder-decode-0a1b-x7f2k", "controller": True}
    metadata = {"name": CLAIMS.pod_name, "namespace": "llm", "uid": DECODE.uid, "labels": LABELS}
    return {"metadata": metadata | {"ownerReferences": [owner]} | changes, "status": {"phase": "Running"}}


def make_deployment(*, args: tuple[str, ...] = (FLAG_IDENTITY_SERVER, "operator.specserve.svc:9443")) -> dict[str, Any]:
    containers = [{"name": "engine", "args": list(args)}]
    return {
        "kind": "Deployment",
        "metadata": {"name": "coder-decode-0a1b", "labels": LABELS, "ownerReferences": [{"uid": "service-uid"}]},
        "spec": {"template": {"spec": {"containers": containers}}},
    }


def judge(
    pod: dict[str, Any],
    deployment: dict[str, Any] | None = None,
    *,
    service: dict[str, Any] | None = SERVICE,
    claims: PodClaims = CLAIMS,
) -> PodId:
    """Who the pod is in a namespace with one Deployment and one service or none."""
    deployment = deployment or make_deployment()

    def named(name: str, *objects: dict[str, Any] | None) -> dict[str, Any] | None:
        return next((obj for obj in objects if obj and obj["metadata"]["name"] == name), None)

    return certified_pod_id(
        claims,
        pod,
        find_service=lambda name: named(name, service),
        find_deployment=lambda name: named(name, deployment),
    )


def test_a_pod_of_the_services_workload_is_who_its_labels_say() -> None:
    assert judge(make_pod()) == PodId("llm", "coder", "decode", DECODE.uid)


def test_a_pod_that_has_just_been_made_or_is_leaving_still_gets_one() -> None:
    for changes in ({}, {"deletionTimestamp": "2030-01-01T00:00:00Z"}):
        pod = make_pod(**changes)
        del pod["status"]
        assert judge(pod).uid == DECODE.uid


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_gets_none(phase: str) -> None:
    pod = make_pod()
    pod["status"]["phase"] = phase
    with pytest.raises(PodRefusedError, match="ended"):
        judge(pod)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"uid": "another"}, "another one by now"),
        ({"labels": {}}, "no pool"),
        ({"labels": LABELS | {"specserve.dev/pool": "gateway"}}, "no pool"),
        ({"labels": LABELS | {"specserve.dev/pool": "operator"}}, "no pool"),
        ({"labels": LABELS | {"specserve.dev/service": "other"}}, "no SpeculativeService other"),
        ({"labels": LABELS | {"specserve.dev/revision": "ffff"}}, "no workload"),
        ({"labels": LABELS | {"specserve.dev/pool": "prefill"}}, "no workload"),
        ({"ownerReferences": []}, "no workload"),
        ({"ownerReferences": None}, "no workload"),
        ({"ownerReferences": [{"kind": "ReplicaSet", "name": "mine-x", "controller": True}]}, "no workload"),
        ({"ownerReferences": [{"kind": "Job", "name": "coder-decode-0a1b-x7f2k", "controller": True}]}, "no workload"),
        ({"ownerReferences": [{"kind": "ReplicaSet", "name": "coder-decode-0a1b-x7f2k"}]}, "no workload"),
    ],
)
def test_a_pod_that_is_not_of_a_workload_of_the_service_gets_none(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PodRefusedError, match=reason):
        judge(make_pod(**changes))


@pytest.mark.parametrize(
    "pod",
    [
        make_pod(uid="another"),
        make_pod(labels={}),
        make_pod(labels=LABELS | {"specserve.dev/pool": "gateway"}),
        make_pod() | {"status": {"phase": "Failed"}},
    ],
)
def test_nothing_is_looked_up_for_a_pod_that_can_be_refused_without(pod: dict[str, Any]) -> None:
    def look_up(name: str) -> None:
        pytest.fail(f"{name} was looked up")

    with pytest.raises(PodRefusedError):
        certified_pod_id(CLAIMS, pod, find_service=look_up, find_deployment=look_up)


def test_a_workload_of_somebody_else_counts_for_nothing() -> None:
    deployment = make_deployment()
    deployment["metadata"]["ownerReferences"] = [{"uid": "another-service"}]
    with pytest.raises(PodRefusedError, match="no workload"):
        judge(make_pod(), deployment)


def test_pods_of_a_workload_in_plain_text_get_none() -> None:
    with pytest.raises(PodRefusedError, match="no workload"):
        judge(make_pod(), make_deployment(args=("--model", "x")))


def test_a_service_that_is_gone_has_no_pods() -> None:
    with pytest.raises(PodRefusedError, match="no SpeculativeService coder"):
        judge(make_pod(), service=None)


def test_a_uid_that_is_no_name_is_refused() -> None:
    claims = PodClaims("llm", CLAIMS.pod_name, "a/b", "default")
    with pytest.raises(PodRefusedError, match="uid"):
        judge(make_pod(uid="a/b"), claims=claims)


def test_revisions_whose_pods_have_certificates_are_told_from_others() -> None:
    plain = deepcopy(make_deployment(args=("--model", "x")))
    plain["metadata"]["labels"] = LABELS | {"specserve.dev/revision": "old"}
    pod = make_pod() | {"kind": "Pod"}
    assert certified_revisions([make_deployment(), plain, pod]) == {("decode", "0a1b")}
