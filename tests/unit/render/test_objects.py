"""What is rendered fits together: names, selectors, owners, order, flags."""

from dataclasses import replace
from typing import Any

import pytest

from specserve_operator.constants import ANNOTATION_SPEC_HASH, GROUP
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import plan
from specserve_operator.core.snapshot import Snapshot
from specserve_operator.render import render
from tests.unit.core.builders import (
    CONFIG,
    DRAFT_MODEL,
    deployments_of,
    disaggregated,
    make_service,
    make_snapshot,
    pods_of,
    ready_children,
    set_ready,
)


def rendered(snapshot: Snapshot) -> list[Manifest]:
    return render(plan(snapshot))


def new(**spec: Any) -> list[Manifest]:
    return rendered(make_snapshot(disaggregated(**spec)))


def of_kind(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


def container(objects: list[Manifest], pool: str) -> dict[str, Any]:
    (deployment,) = deployments_of(objects, pool)
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def flag(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def test_what_pods_refer_to_is_applied_before_them() -> None:
    kinds = [o["kind"] for o in new()]
    first_workload = kinds.index("Deployment")
    for kind in ("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Service"):
        assert kinds.index(kind) < first_workload
    assert kinds.index("ServiceAccount") < kinds.index("RoleBinding")


def test_every_object_is_owned_by_the_service_and_carries_its_label() -> None:
    for obj in new():
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "specserve.dev/v1alpha1",
            "kind": "SpeculativeService",
            "name": "coder",
            "uid": "uid-1",
            "controller": True,
            "blockOwnerDeletion": True,
        }
        assert obj["metadata"]["namespace"] == "llm"
        assert obj["metadata"]["labels"]["specserve.dev/service"] == "coder"


def test_selectors_use_only_our_keys_and_match_the_pods_they_are_for() -> None:
    objects = new()
    pods = {
        o["metadata"]["name"]: o["spec"]["template"]["metadata"]["labels"]
        for o in of_kind(objects, "Deployment").values()
    }
    for obj in objects:
        spec = obj.get("spec", {})
        found = spec.get("selector", {})
        selector = found.get("matchLabels", found)
        assert all(key.startswith(f"{GROUP}/") for key in selector)
        if selector:
            matched = [name for name, labels in pods.items() if selector.items() <= labels.items()]
            assert len(matched) == 1, (obj["kind"], obj["metadata"]["name"], matched)


def test_decode_pods_resolve_the_service_of_their_own_target_revision() -> None:
    objects = new()
    args = container(objects, "decode")["args"]
    name, _, port = flag(args, "--prefill-peers").partition(":")
    peers = of_kind(objects, "Service")[name]
    assert port == "8000"
    assert peers["spec"]["clusterIP"] == "None"
    assert peers["spec"]["selector"]["specserve.dev/target-revision"] == flag(args, "--target-revision")
    assert flag(container(objects, "prefill")["args"], "--target-revision") == flag(args, "--target-revision")


def test_the_revision_flag_is_the_one_in_the_workloads_name_and_labels() -> None:
    for pool in ("prefill", "decode"):
        (deployment,) = deployments_of(new(), pool)
        revision = flag(deployment["spec"]["template"]["spec"]["containers"][0]["args"], "--revision")
        assert deployment["metadata"]["name"] == f"coder-{pool}-{revision}"
        assert deployment["metadata"]["labels"]["specserve.dev/revision"] == revision


def test_only_decode_pods_have_a_drafter_and_only_with_speculation() -> None:
    assert "--draft-model" not in container(new(), "prefill")["args"]
    assert flag(container(new(), "decode")["args"], "--max-draft-tokens") == "8"
    without = container(new(speculation=None), "decode")["args"]
    assert not any(arg.startswith(("--draft", "--max-draft")) for arg in without)


def test_an_aggregated_service_has_no_kv_transfer_flags() -> None:
    args = container(new(prefill=None), "decode")["args"]
    assert not any(arg.startswith(("--kv", "--prefill")) for arg in args)


def test_engine_args_of_the_service_come_before_those_of_the_pool() -> None:
    objects = new(engine={"args": ["--dtype", "float32"]}, decode={"args": ["--max-num-seqs", "4"]})
    args = container(objects, "decode")["args"]
    assert args[args.index("--") :] == ["--", "--dtype", "float32", "--max-num-seqs", "4"]
    assert container(objects, "prefill")["args"][-3:] == ["--", "--dtype", "float32"]


def test_the_token_comes_from_the_secret() -> None:
    env = container(new(model={"uri": "hf://a/b@c", "secretName": "hub"}), "decode")["env"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in env
    args = container(new(model={"uri": "hf://a/b@c"}), "prefill")["args"]
    assert (flag(args, "--model"), flag(args, "--model-revision")) == ("a/b", "c")


def test_a_pod_is_given_its_drain_time_and_a_margin() -> None:
    objects = new(decode={"drainTimeoutSeconds": 300})
    (deployment,) = deployments_of(objects, "decode")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 330
    hook = {"exec": {"command": ["python", "-m", "specserve_workers.drain"]}}
    assert pod["containers"][0]["lifecycle"]["preStop"] == hook
    (gateway,) = deployments_of(objects, "gateway")
    assert gateway["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 330


def test_loading_may_take_half_an_hour() -> None:
    probe = container(new(), "decode")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800


def test_the_gateway_finds_decode_pods_only_and_tries_two_of_them() -> None:
    args = container(new(), "gateway")["args"]
    start = args.index("--selector")
    assert args[start + 1 : start + 3] == ["specserve.dev/service=coder", "specserve.dev/pool=decode"]
    assert flag(args, "--service-discovery-namespace") == "llm"
    assert flag(args, "--retry-max-retries") == "2"


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (None, {"policy": "Off", "cap": "None", "minTokens": 0, "maxTokens": 0, "staticTokens": 0}),
        (
            {"draft": DRAFT_MODEL},
            {"policy": "DSDE", "cap": "Mean", "minTokens": 0, "maxTokens": 8, "staticTokens": 0},
        ),
        (
            {"draft": DRAFT_MODEL, "mode": "Never", "length": {"max": 5}},
            {"policy": "Off", "cap": "Mean", "minTokens": 0, "maxTokens": 5, "staticTokens": 0},
        ),
        (
            {"draft": DRAFT_MODEL, "rolloutPercent": 0},
            {"policy": "Off", "cap": "Mean", "minTokens": 0, "maxTokens": 8, "staticTokens": 0},
        ),
        (
            {"draft": DRAFT_MODEL, "length": {"policy": "Static", "tokens": 3, "min": 1, "max": 4}},
            {"policy": "Static", "cap": "None", "minTokens": 1, "maxTokens": 4, "staticTokens": 3},
        ),
    ],
)
def test_the_runtime_state_is_what_the_spec_asks_for(speculation: Any, expected: dict[str, Any]) -> None:
    import json

    config = of_kind(new(generation=5, speculation=speculation), "ConfigMap")["coder-runtime"]
    state = json.loads(config["data"]["state.json"])
    assert state == {"version": 1, "generation": 5, "speculation": expected}


@pytest.mark.parametrize(("replicas", "budgets"), [(1, set()), (2, {"coder-decode"})])
def test_only_pools_that_can_spare_a_pod_have_a_disruption_budget(replicas: int, budgets: set[str]) -> None:
    assert set(of_kind(new(decode={"replicas": replicas}), "PodDisruptionBudget")) == budgets


def test_on_one_machine_nothing_is_mounted_over_its_folders() -> None:
    snapshot = make_snapshot(disaggregated(), config=replace(CONFIG, local=True))
    objects = rendered(snapshot)
    for pool in ("prefill", "decode"):
        assert [m["mountPath"] for m in container(objects, pool)["volumeMounts"]] == ["/etc/specserve/runtime"]
        assert {e["name"] for e in container(objects, pool)["env"]} == {
            "POD_NAME",
            "POD_UID",
            "POD_IP",
            "POD_NAMESPACE",
        }
    assert "volumeMounts" not in container(objects, "gateway")


def test_the_trust_bundle_is_kept_up_to_date_also_while_the_spec_has_problems() -> None:
    """Running pods would else trust nobody after a rotation."""
    config = replace(CONFIG, identity_server="operator.svc:9443", trust_bundle="old and new")
    secure = {"kvTransfer": {"tls": "Automatic"}}
    for spec in (secure, {**secure, "budget": {"maxGPUs": 1}}):
        first = rendered(make_snapshot(disaggregated(**spec), config=config))[0]
        assert (first["metadata"]["name"], first["data"]) == ("coder-trust", {"ca.pem": "old and new"})
    names = {o["metadata"]["name"] for o in rendered(make_snapshot(disaggregated(), config=config))}
    assert "coder-trust" not in names


def test_the_hash_changes_with_the_object_and_only_then() -> None:
    def hashes(objects: list[Manifest]) -> dict[tuple[str, str], str]:
        return {(o["kind"], o["metadata"]["name"]): o["metadata"]["annotations"][ANNOTATION_SPEC_HASH] for o in objects}

    before, after = hashes(new()), hashes(new(decode={"replicas": 3}))
    assert before == hashes(new())
    changed = {key for key in before if before[key] != after[key]}
    assert {kind for kind, _ in changed} == {"Deployment"}, "replicas are in no record"
    assert len(changed) == 1


def test_an_old_workload_is_applied_again_with_other_replicas_and_without_foreign_fields() -> None:
    children = ready_children(disaggregated())
    (old,) = deployments_of(children, "decode")
    old["metadata"] |= {"resourceVersion": "7", "managedFields": [{}]}
    old["metadata"]["annotations"] |= {"deployment.kubernetes.io/revision": "1"}
    old["status"] = {"readyReplicas": 2}
    set_ready(pods_of(children, "decode")[0], False)
    service = disaggregated(decode={"replicas": 2, "args": ["--max-num-seqs", "4"]}, rollout={"maxUnavailable": 1})
    for pod in pods_of(children, "decode"):
        pod["status"]["containerStatuses"][0]["started"] = False
    applied = of_kind(rendered(make_snapshot(service, children)), "Deployment")[old["metadata"]["name"]]
    assert applied["spec"] == {**old["spec"], "replicas": 1}
    assert "status" not in applied
    assert set(applied["metadata"]) == {"name", "namespace", "labels", "annotations", "ownerReferences"}
    assert all(key.startswith(f"{GROUP}/") for key in applied["metadata"]["annotations"])


def test_an_old_workload_that_keeps_its_replicas_is_not_touched() -> None:
    children = ready_children(disaggregated())
    (old,) = deployments_of(children, "decode")
    service = disaggregated(decode={"replicas": 2, "args": ["--max-num-seqs", "4"]})
    assert old["metadata"]["name"] not in of_kind(rendered(make_snapshot(service, children)), "Deployment")


def test_names_of_the_longest_service_fit_into_labels() -> None:
    service = make_service(prefill={})
    long = service.model_copy(update={"metadata": service.metadata.model_copy(update={"name": "a" * 36})})
    for obj in rendered(make_snapshot(long)):
        assert len(obj["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in obj["metadata"]["labels"].values())
