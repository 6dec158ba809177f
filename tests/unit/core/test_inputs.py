"""What of a spec decides its pods: digests that stay the same from version to version."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.inputs import pool_inputs, target_inputs
from specserve_operator.core.names import Pool
from tests.unit.core.builders import DRAFT_MODEL, disaggregated, make_service

FULL: dict[str, Any] = {
    "model": {"uri": "hf://acme/coder@abc", "name": "coder", "secretName": "hub"},
    "engine": {"image": "engine:1", "args": ["--max-model-len", "8192"]},
    "kvTransfer": {"tls": "Automatic", "leaseSeconds": 10, "onFailure": "Fail"},
    "prefill": {"replicas": 2, "drainTimeoutSeconds": 60, "args": ["--max-num-batched-tokens", "16384"]},
    "decode": {"scaling": {"mode": "External", "maxReplicas": 4}, "template": {"spec": {"nodeSelector": {"a": "b"}}}},
    "gateway": {"replicas": 2, "port": 8080, "template": {"metadata": {"labels": {"team": "x"}}}},
}


def digests(service: SpeculativeService) -> dict[str, str]:
    serving = (Pool.PREFILL,) if service.spec.prefill is not None else ()
    pools = {str(pool): pool_inputs(service, pool) for pool in (*serving, Pool.DECODE, Pool.GATEWAY)}
    return {"target": target_inputs(service), **pools}


def changed(**spec: Any) -> set[str]:
    before, after = digests(disaggregated()), digests(disaggregated(**spec))
    return {name for name in before if before[name] != after.get(name)}


def test_digests_are_those_of_every_earlier_version() -> None:
    """Pods of every service in the world are restarted where one of these changes. So: never."""
    assert digests(make_service()) == {"target": "49a8c0e02b", "decode": "f73c816de2", "gateway": "ae5cd0d950"}
    assert digests(disaggregated(**FULL)) == {
        "target": "c3d5f12c30",
        "prefill": "4e8a920e14",
        "decode": "913b0b3ba7",
        "gateway": "06bf145889",
    }


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({"model": {"uri": "file:///models/other"}}, {"target", "prefill", "decode"}),
        ({"engine": {"args": ["--dtype", "float32"]}}, {"target", "prefill", "decode"}),
        ({"engine": {"image": "engine:2"}}, {"target", "prefill", "decode"}),
        ({"kvTransfer": {"tls": "Automatic"}}, {"target", "prefill", "decode"}),
        ({"kvTransfer": {"leaseSeconds": 7}}, {"prefill", "decode"}),
        ({"model": {"uri": "file:///models/target", "name": "alias"}}, {"prefill", "decode"}),
        ({"decode": {"replicas": 2, "args": ["--max-num-seqs", "4"]}}, {"decode"}),
        ({"prefill": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}, {"prefill"}),
        ({"speculation": {"draft": {**DRAFT_MODEL, "uri": "file:///models/draft2"}}}, {"decode"}),
        ({"speculation": None}, {"decode"}),
        ({"prefill": None, "kvTransfer": {"tls": "Disabled"}}, {"prefill", "decode"}),
        ({"decode": {"replicas": 2, "drainTimeoutSeconds": 5}}, {"decode", "gateway"}),
        ({"gateway": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}, {"gateway"}),
    ],
)
def test_what_decides_pods_changes_the_digests_of_their_pools(spec: dict[str, Any], names: set[str]) -> None:
    assert changed(**spec) == names


@pytest.mark.parametrize(
    "spec",
    [
        {"decode": {"replicas": 5}},
        {"decode": {"scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 9}}},
        {"speculation": {"draft": DRAFT_MODEL, "mode": "Never"}},
        {"speculation": {"draft": DRAFT_MODEL, "rolloutPercent": 0}},
        {"speculation": {"draft": DRAFT_MODEL, "length": {"policy": "Static", "tokens": 2}}},
        {"speculation": {"draft": DRAFT_MODEL, "length": {"max": 64}}},
        {"objectives": {"timePerOutputToken": [{"percentile": 90, "milliseconds": 40}]}},
        {"rollout": {"maxSurge": 2}},
        {"gateway": {"replicas": 3, "port": 8080}},
        {"generation": 9},
        {"annotations": {"specserve.dev/upgrade": "1"}},
    ],
)
def test_what_changes_without_new_pods_changes_no_digest(spec: dict[str, Any]) -> None:
    assert changed(**spec) == set()


def test_defaults_that_an_api_server_fills_in_change_no_digest() -> None:
    """Also those of fields that the user's own manifest has not."""
    filled = disaggregated(
        engine={"args": []},
        kvTransfer={
            "tls": "Disabled",
            "connectTimeoutMilliseconds": 500,
            "stallTimeoutMilliseconds": 5000,
            "leaseSeconds": 30,
            "onFailure": "Recompute",
        },
        prefill={"replicas": 1, "drainTimeoutSeconds": 120, "args": []},
        decode={"replicas": 2, "drainTimeoutSeconds": 120, "args": []},
        gateway={"replicas": 1, "port": 80},
    )
    assert digests(filled) == digests(disaggregated())


@given(st.permutations(["a", "b", "c"]))
def test_the_order_of_keys_in_a_template_does_not_count_and_that_of_arguments_does(order: list[str]) -> None:
    def inputs(keys: list[str], args: list[str]) -> str:
        selector = {key: "x" for key in keys}
        pool = {"args": args, "template": {"spec": {"nodeSelector": selector}}}
        return pool_inputs(make_service(decode=pool), Pool.DECODE)

    assert inputs(order, []) == inputs(["a", "b", "c"], [])
    assert (inputs(["a"], order) == inputs(["a"], ["a", "b", "c"])) is (order == ["a", "b", "c"])
