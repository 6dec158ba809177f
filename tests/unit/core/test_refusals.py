"""Specs that cannot be served: each is refused by the name of its field."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.core.plan import plan
from specserve_operator.render import render
from tests.unit.core.builders import CONFIG, DRAFT_MODEL, disaggregated, make_service, make_snapshot, ready_children

LOCAL = dataclasses.replace(CONFIG, local=True)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"uri": "s3://bucket/model"}}, "spec.model.uri: s3:// is not supported"),
        ({"model": {"uri": "hf://a/b/c"}}, "spec.model.uri: hf://a/b/c is not of the form"),
        ({"speculation": {"draft": {"method": "NGram"}}}, "spec.speculation.draft.method: NGram"),
        (
            {"speculation": {"draft": {"method": "DraftModel", "uri": "oci://x/y"}}},
            "spec.speculation.draft.uri: oci:// is not supported",
        ),
        (
            {"speculation": {"draft": DRAFT_MODEL, "length": {"policy": "AdaEDL"}}},
            "spec.speculation.length.policy: AdaEDL",
        ),
        (
            {"speculation": {"draft": DRAFT_MODEL, "length": {"cap": "Goodput"}}},
            "spec.speculation.length.cap: Goodput",
        ),
        ({"speculation": {"draft": DRAFT_MODEL, "rolloutPercent": 50}}, "spec.speculation.rolloutPercent: 50"),
        ({"classes": [{"name": "batch"}]}, "spec.classes: "),
        ({"budget": {"maxGPUs": 4}}, "spec.budget: "),
        ({"prefill": {"scaling": {"maxReplicas": 2}}}, "spec.prefill.scaling: mode Auto is not built yet"),
        (
            {"decode": {"scaling": {"mode": "Advise", "minReplicas": 2, "maxReplicas": 3}}},
            "spec.decode.scaling: mode Advise is not built yet",
        ),
        (
            {"decode": {"template": {"spec": {"containers": [{"name": "engine", "args": ["x"]}]}}}},
            "spec.decode.template.spec.containers[engine].args",
        ),
        (
            {"prefill": {"template": {"spec": {"containers": [{"name": "engine", "image": "x"}]}}}},
            "spec.prefill.template.spec.containers[engine].image: set by the operator (use spec.engine.image",
        ),
        (
            {"decode": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}},
            "spec.decode.template.spec.terminationGracePeriodSeconds",
        ),
        (
            {
                "gateway": {
                    "template": {"spec": {"containers": [{"name": "gateway", "lifecycle": {"preStop": {"sleep": {}}}}]}}
                }
            },
            "spec.gateway.template.spec.containers[gateway].lifecycle.preStop",
        ),
        (
            {"decode": {"template": {"spec": {"containers": [{"name": "engine", "lifecycle": 1}]}}}},
            "spec.decode.template.spec.containers[engine].lifecycle: must be an object",
        ),
        (
            {"decode": {"template": {"spec": {"containers": [{"name": "engine", "env": ["A=1"]}]}}}},
            "spec.decode.template.spec.containers.env: every entry must have name",
        ),
    ],
)
def test_what_this_version_cannot_serve_is_named_and_nothing_is_touched(spec: dict[str, Any], field: str) -> None:
    children = ready_children(disaggregated())
    result = plan(make_snapshot(disaggregated(**spec), children))
    assert [p for p in result.problems if p.startswith(field)], result.problems
    assert (render(result), result.deletions) == ([], ())


container_values = st.recursive(
    st.none() | st.just("engine") | st.integers(0, 1),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "value", "preStop", "httpGet", "env"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["env", "ports", "volumeMounts", "livenessProbe", "lifecycle", "resources", "image"]),
        container_values,
    ),
    st.dictionaries(st.sampled_from(["imagePullSecrets", "tolerations", "hostAliases"]), container_values),
)
def test_any_template_that_the_api_lets_through_is_either_refused_with_its_field_or_rendered(
    container: dict[str, Any], pod: dict[str, Any]
) -> None:
    template = {"spec": {**pod, "containers": [{**container, "name": "engine"}]}}
    result = plan(make_snapshot(disaggregated(decode={"template": template})))
    assert (render(result) == []) is bool(result.problems)
    assert all(p.startswith("spec.decode.template.spec") for p in result.problems)


def test_without_a_prefill_pool_there_is_nothing_to_encrypt() -> None:
    service = make_service(kvTransfer={"tls": "Automatic"})
    assert plan(make_snapshot(service)).problems == ()


def test_on_one_machine_automatic_tls_is_plain_text_on_loopback() -> None:
    service = disaggregated(kvTransfer={"tls": "Automatic"})
    assert plan(make_snapshot(service, config=LOCAL)).problems == ()


def test_a_secret_needs_a_cluster() -> None:
    service = make_service(model={"uri": "hf://a/b", "secretName": "hub"})
    assert plan(make_snapshot(service)).problems == ()
    (problem,) = plan(make_snapshot(service, config=LOCAL)).problems
    assert problem.startswith("spec.model.secretName: there are no Secrets on one machine")


def test_a_claim_needs_a_cluster() -> None:
    service = make_service(model={"uri": "pvc://models/a"})
    assert plan(make_snapshot(service)).problems == ()
    (problem,) = plan(make_snapshot(service, config=LOCAL)).problems
    assert problem == "spec.model.uri: pvc:// needs a Kubernetes cluster; here use file:// or hf://"
