"""A revision changes with what a pod is started with, and with nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.names import Pool
from specserve_operator.core.plan import Plan, plan
from specserve_operator.core.revision import canonical_json, digest
from tests.unit.core.builders import DRAFT_MODEL, disaggregated, make_snapshot

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def planned(service: SpeculativeService) -> Plan:
    result = plan(make_snapshot(service))
    assert result.problems == ()
    return result


def revisions(service: SpeculativeService) -> dict[str, str]:
    return {str(p.pool): p.current.revision for p in planned(service).pools}


def changed(**spec: Any) -> set[str]:
    """The pools whose revision differs from the plain service's."""
    before, after = revisions(disaggregated()), revisions(disaggregated(**spec))
    return {pool for pool in before if before[pool] != after.get(pool)}


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_digest_ignores_the_order_of_keys_and_has_ten_hex_digits(value: dict[str, Any]) -> None:
    reordered = dict(reversed(list(value.items())))
    assert canonical_json(value) == canonical_json(reordered)
    assert len(digest(value)) == 10
    assert set(digest(value)) <= set("0123456789abcdef")


def test_digest_is_the_same_on_every_machine_and_version() -> None:
    assert digest({"b": [1, "ü"], "a": None}) == "e6079cc869"


def test_digest_refuses_what_json_has_not() -> None:
    with pytest.raises(TypeError):
        digest({"a": {1, 2}})


def test_the_same_spec_has_the_same_revisions() -> None:
    assert revisions(disaggregated()) == revisions(disaggregated(generation=9))


@pytest.mark.parametrize(
    "spec",
    [
        {"speculation": {"draft": DRAFT_MODEL, "mode": "Never"}},
        {"speculation": {"draft": DRAFT_MODEL, "mode": "Always"}},
        {"speculation": {"draft": DRAFT_MODEL, "rolloutPercent": 0}},
        {"speculation": {"draft": DRAFT_MODEL, "length": {"policy": "Static", "tokens": 2, "max": 8}}},
        {"speculation": {"draft": DRAFT_MODEL, "length": {"min": 2, "cap": "None"}}},
        {"decode": {"replicas": 5}},
        {"prefill": {"scaling": {"minReplicas": 4, "maxReplicas": 4}}},
        {"objectives": {"timePerOutputToken": [{"percentile": 90, "milliseconds": 40}]}},
        {"rollout": {"maxSurge": 2}},
        {"gateway": {"replicas": 3, "port": 8080}},
    ],
)
def test_run_time_changes_restart_no_pod(spec: dict[str, Any]) -> None:
    assert changed(**spec) == set()


@pytest.mark.parametrize(
    ("spec", "pools"),
    [
        ({"model": {"uri": "file:///models/other"}}, {"prefill", "decode"}),
        ({"engine": {"args": ["--dtype", "float32"]}}, {"prefill", "decode"}),
        ({"engine": {"image": "registry.test/engine:2"}}, {"prefill", "decode"}),
        ({"kvTransfer": {"leaseSeconds": 7}}, {"prefill", "decode"}),
        ({"decode": {"args": ["--max-num-seqs", "4"]}}, {"decode"}),
        ({"prefill": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}, {"prefill"}),
        ({"speculation": {"draft": {**DRAFT_MODEL, "uri": "file:///models/draft2"}}}, {"decode"}),
        ({"speculation": {"draft": DRAFT_MODEL, "length": {"max": 9}}}, {"decode"}),
        ({"speculation": None}, {"decode"}),
        ({"gateway": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}, {"gateway"}),
        ({"decode": {"drainTimeoutSeconds": 5}}, {"decode", "gateway"}),
    ],
)
def test_a_change_of_the_pods_restarts_only_the_pools_it_concerns(spec: dict[str, Any], pools: set[str]) -> None:
    assert changed(**spec) == pools


@pytest.mark.parametrize(
    ("spec", "is_new"),
    [
        ({"model": {"uri": "file:///models/other"}}, True),
        ({"engine": {"args": ["--block-size", "32"]}}, True),
        ({"engine": {"image": "registry.test/engine:2"}}, True),
        ({"speculation": None}, False),
        ({"decode": {"args": ["--max-num-seqs", "4"]}}, False),
        ({"kvTransfer": {"leaseSeconds": 7}}, False),
        ({"model": {"uri": "file:///models/target", "name": "alias", "secretName": "hub"}}, False),
    ],
)
def test_only_what_decides_the_kv_cache_ends_the_pairing_of_pods(spec: dict[str, Any], is_new: bool) -> None:
    before, after = planned(disaggregated()).target_revision, planned(disaggregated(**spec)).target_revision
    assert (before != after) is is_new


def test_prefill_and_decode_share_one_target_revision() -> None:
    pools = planned(disaggregated(decode={"args": ["--max-num-seqs", "4"]}))
    assert {p.current.target_revision for p in pools.pools if p.pool is not Pool.GATEWAY} == {pools.target_revision}
