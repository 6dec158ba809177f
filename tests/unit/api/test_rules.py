"""Each rule over several fields, as CEL and as pydantic validator, on the same examples."""

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from specserve_operator.api import pools
from specserve_operator.api import v1alpha1 as api
from specserve_operator.api.cel import Rule
from specserve_operator.api.engine_flags import OWNED_FLAG_RULE, OWNED_FLAGS, EngineArg
from specserve_operator.api.rules import RULES
from specserve_operator.api.structural import structural_schema
from tests.unit.api.fake_apiserver import broken_rules, evaluate, with_defaults


@dataclass(frozen=True)
class Case:
    """Objects that keep (`accepted`) and that break (`refused`) the rule of `model` whose message starts so."""

    model: type[BaseModel]
    message: str
    accepted: tuple[dict[str, Any], ...]
    refused: tuple[dict[str, Any], ...]


MODEL = {"uri": "hf://org/target"}
NGRAM = {"draft": {"method": "NGram"}}
DRAFT_MODEL = {"draft": {"method": "DraftModel", "uri": "hf://org/draft"}}
STORAGE = {"storage": {"uri": "pvc://drafts"}}


def named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"model": MODEL}}


CASES = (
    Case(
        api.SpeculativeService,
        "metadata.name must have at most",
        accepted=(named("a"), named("a" * 36)),
        refused=(named("a" * 37),),
    ),
    Case(
        api.SpeculativeService,
        "metadata.name must start with a letter",
        accepted=(named("coder-2"), named("c")),
        refused=(named("2-coder"), named("coder-"), named("coder.a"), named("Coder")),
    ),
    Case(
        api.SpeculativeServiceSpec,
        "training needs speculation",
        accepted=(
            {"model": MODEL},
            {"model": MODEL, "speculation": NGRAM},
            {"model": MODEL, "speculation": DRAFT_MODEL, "training": STORAGE},
        ),
        refused=(
            {"model": MODEL, "training": STORAGE},
            {"model": MODEL, "training": STORAGE, "speculation": NGRAM},
            {
                "model": MODEL,
                "training": STORAGE,
                "speculation": {"draft": {"method": "Medusa", "uri": "hf://org/heads"}},
            },
        ),
    ),
    Case(
        api.SpeculativeServiceSpec,
        "prefill and decode are scaled to zero together",
        accepted=(
            {"model": MODEL, "decode": {"replicas": 0}},
            {"model": MODEL, "prefill": {}},
            {"model": MODEL, "prefill": {"replicas": 0}, "decode": {"replicas": 0}},
            {
                "model": MODEL,
                "prefill": {"replicas": 0},
                "decode": {"scaling": {"minReplicas": 0, "maxReplicas": 2}},
            },
        ),
        refused=(
            {"model": MODEL, "prefill": {"replicas": 0}},
            {"model": MODEL, "prefill": {}, "decode": {"replicas": 0}},
            {"model": MODEL, "prefill": {"scaling": {"minReplicas": 0, "maxReplicas": 2}}},
            {
                "model": MODEL,
                "prefill": {"scaling": {"maxReplicas": 2}},
                "decode": {"scaling": {"minReplicas": 0, "maxReplicas": 2}},
            },
        ),
    ),
    Case(
        pools.ServingPool,
        "replicas and scaling exclude",
        accepted=({}, {"replicas": 2}, {"scaling": {"maxReplicas": 2}}),
        refused=({"replicas": 2, "scaling": {"maxReplicas": 2}}, {"replicas": 0, "scaling": {"maxReplicas": 1}}),
    ),
    Case(
        api.Draft,
        "uri is required",
        accepted=({"method": "NGram"}, {"method": "EAGLE3", "uri": "hf://org/head"}),
        refused=({"method": "NGram", "uri": "hf://org/head"}, {"method": "EAGLE3"}, {"method": "DraftModel"}),
    ),
    Case(
        api.Length,
        "min must not exceed max",
        accepted=({}, {"min": 3, "max": 3}),
        refused=({"min": 4, "max": 3}, {"min": 9}),
    ),
    Case(
        api.Length,
        "tokens is required with policy Static",
        accepted=({"policy": "Static", "tokens": 0}, {"policy": "DSDE"}),
        refused=({"policy": "Static"}, {"policy": "DSDE", "tokens": 2}, {"tokens": 2}),
    ),
    Case(
        api.Length,
        "tokens must not exceed max",
        accepted=({"policy": "Static", "tokens": 3, "max": 3},),
        refused=({"policy": "Static", "tokens": 4, "max": 3}, {"policy": "Static", "tokens": 9}),
    ),
    Case(
        pools.Scaling,
        "minReplicas must not exceed",
        accepted=({"maxReplicas": 1}, {"minReplicas": 3, "maxReplicas": 3}),
        refused=({"minReplicas": 3, "maxReplicas": 2},),
    ),
    Case(
        pools.TrainingScaling,
        "minReplicas must not exceed",
        accepted=({}, {"minReplicas": 1}),
        refused=({"minReplicas": 2}, {"minReplicas": 3, "maxReplicas": 2}),
    ),
    Case(
        pools.Rollout,
        "maxUnavailable and maxSurge",
        accepted=({}, {"maxUnavailable": 1, "maxSurge": 0}),
        refused=({"maxSurge": 0}, {"maxUnavailable": 0, "maxSurge": 0}),
    ),
    Case(
        pools.Rollout,
        "minReadySeconds must be less",
        accepted=({"minReadySeconds": 30}, {"minReadySeconds": 59, "progressDeadlineSeconds": 60}),
        refused=({"minReadySeconds": 60, "progressDeadlineSeconds": 60}, {"minReadySeconds": 1800}),
    ),
)
TRANSITION_RULES = {"a draft revision is immutable"}

ACCEPTED = [(case, example) for case in CASES for example in case.accepted]
REFUSED = [(case, example) for case in CASES for example in case.refused]


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The schema that the CRD has for `model`; of a whole service, only what its own rules look at."""
    if model is api.SpeculativeService:
        return {"x-kubernetes-validations": [rule.to_schema() for rule in RULES[model]]}
    return structural_schema(model)


def case_id(value: Any) -> str:
    return f"{value.model.__name__}: {value.message}" if isinstance(value, Case) else ""


@pytest.mark.parametrize(("case", "example"), ACCEPTED, ids=case_id)
def test_example_that_keeps_the_rules_is_accepted(case: Case, example: dict[str, Any]) -> None:
    schema = schema_of(case.model)
    assert broken_rules(schema, with_defaults(schema, example)) == []
    case.model.model_validate(example)


@pytest.mark.parametrize(("case", "example"), REFUSED, ids=case_id)
def test_example_that_breaks_the_rule_is_refused_by_it(case: Case, example: dict[str, Any]) -> None:
    schema = schema_of(case.model)
    broken = [m for m in broken_rules(schema, with_defaults(schema, example)) if m.startswith(case.message)]
    assert len(broken) == 1
    with pytest.raises(ValidationError) as refusal:
        case.model.model_validate(example)
    if case.model is api.SpeculativeService:  # a pattern and a length to pydantic
        assert refusal.value.errors()[0]["loc"] == ("metadata", "name")
    else:
        assert [str(error["ctx"]["error"]) for error in refusal.value.errors()] == broken


def test_every_rule_has_accepting_and_refusing_examples() -> None:
    untested = {
        f"{model.__name__}: {rule.message}"
        for model, rules in RULES.items()
        for rule in rules
        if rule.message not in TRANSITION_RULES
        and not any(
            case.model is model and rule.message.startswith(case.message) and case.accepted and case.refused
            for case in CASES
        )
    }
    assert untested == set()


def test_every_rule_is_in_a_crd() -> None:
    from specserve_operator.api.crd import DEFINITIONS, render_yaml

    text = " ".join("".join(render_yaml(definition) for definition in DEFINITIONS).split())
    for rule in [*(rule for rules in RULES.values() for rule in rules), OWNED_FLAG_RULE]:
        assert rule.message in text.replace("''", "'")


@pytest.mark.parametrize("flag", OWNED_FLAGS)
@pytest.mark.parametrize("form", ["{}", "{}=x=y", "{}.key", "{}+", "underscores"])
def test_owned_flag_is_refused_in_every_form_the_engine_reads(flag: str, form: str) -> None:
    name = flag[:2] + flag[2:].replace("-", "_") if form == "underscores" else flag
    arg = name if form == "underscores" else form.format(flag)
    assert evaluate(OWNED_FLAG_RULE.expression, arg) is False
    with pytest.raises(ValidationError, match="set by the operator") as refusal:
        TypeAdapter(EngineArg).validate_python(arg)
    assert str(refusal.value.errors()[0]["ctx"]["error"]) == evaluate(OWNED_FLAG_RULE.message_expression, arg)
    assert str(refusal.value.errors()[0]["ctx"]["error"]).endswith(f": {name}")


@pytest.mark.parametrize(
    "arg",
    [
        *("--dtype", "bfloat16", "--seed=8", "--model-impl", "--hf-overrides", "--config-format", "-tp"),
        *("port", "/models/--model", "{'--model': 1}", "--portable", "--spec", "-", ""),
    ],
)
def test_other_flags_and_values_are_accepted(arg: str) -> None:
    assert evaluate(OWNED_FLAG_RULE.expression, arg) is True
    assert TypeAdapter(EngineArg).validate_python(arg) == arg


@pytest.mark.parametrize("path", ["engine", "decode", "prefill"])
def test_owned_flag_is_refused_in_the_args_of_engine_and_pools(path: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        api.SpeculativeServiceSpec.model_validate({"model": MODEL, path: {"args": ["--seed", "1", "--port"]}})
    assert refusal.value.errors()[0]["loc"] == (path, "args", 2)
    items = structural_schema(api.SpeculativeServiceSpec)["properties"][path]["properties"]["args"]["items"]
    assert items["x-kubernetes-validations"] == [OWNED_FLAG_RULE.to_schema()]


def test_draft_revision_cannot_be_changed() -> None:
    schema = structural_schema(api.DraftRevisionSpec)
    draft = {
        "service": "coder",
        "targetRevision": "abc",
        "method": "EAGLE3",
        "uri": "pvc://drafts/3",
        "sha256": "0" * 64,
        "tokenizerSha256": "1" * 64,
        "hiddenSize": 64,
    }
    assert broken_rules(schema, draft) == []
    assert broken_rules(schema, draft, old=draft) == []
    assert broken_rules(schema, {**draft, "hiddenSize": 65}, old=draft) == ["a draft revision is immutable"]


def test_ratcheting_rule_refuses_only_where_the_old_object_kept_it() -> None:
    rule = Rule("self.min <= self.max && selfish", "min must not exceed max", ratcheting=True)
    assert rule.to_schema() == {
        "rule": "(self.min <= self.max && selfish)"
        " || (oldSelf.hasValue() && !(oldSelf.value().min <= oldSelf.value().max && selfish))",
        "message": "min must not exceed max",
        "optionalOldSelf": True,
    }
