from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from specserve_operator.api.base import ApiModel
from specserve_operator.api.markers import Atomic, ListMap, PodTemplate
from specserve_operator.api.pools import Scaling
from specserve_operator.api.structural import SchemaError, structural_schema


class Entry(ApiModel):
    """An entry."""

    name: str


class Sample(ApiModel):
    """A sample."""

    required_field: str
    bounded: Annotated[int, Field(ge=1, le=5)] = 3
    """A bounded
    number."""
    unbounded: Annotated[int, Field(ge=0)] = 0
    optional: Annotated[str | None, Field(max_length=3)] = None
    entries: Annotated[tuple[Entry, ...], ListMap("name")] = ()
    words: Annotated[tuple[str, ...], Atomic()] = ("a",)
    labels: Annotated[dict[str, str], Field(default_factory=dict)]
    template: PodTemplate | None = None
    scaling: Scaling = Scaling(max_replicas=2)
    """How it scales."""


def test_fields_become_structural() -> None:
    schema = structural_schema(Sample)
    assert schema["type"] == "object"
    assert schema["description"] == "A sample."
    assert schema["required"] == ["requiredField"]
    properties = schema["properties"]
    assert properties["bounded"] == {
        "description": "A bounded number.",
        "type": "integer",
        "format": "int32",
        "minimum": 1,
        "maximum": 5,
        "default": 3,
    }
    assert properties["unbounded"]["format"] == "int64"
    assert properties["optional"] == {"type": "string", "maxLength": 3}
    assert properties["entries"] == {
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
        "default": [],
        "items": {
            "description": "An entry.",
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    }
    assert properties["words"]["x-kubernetes-list-type"] == "atomic"
    assert properties["words"]["default"] == ["a"]
    assert properties["labels"] == {
        "type": "object",
        "additionalProperties": {"type": "string"},
    }
    assert properties["template"] == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def test_default_of_an_object_holds_the_defaults_of_its_fields() -> None:
    scaling = structural_schema(Sample)["properties"]["scaling"]
    assert scaling["default"] == {"mode": "Auto", "minReplicas": 1, "maxReplicas": 2}
    assert scaling["description"] == "How it scales."


def test_rules_stand_on_the_model_they_compare_fields_of() -> None:
    (rule,) = structural_schema(Sample)["properties"]["scaling"]["x-kubernetes-validations"]
    assert rule["rule"] == "self.minReplicas <= self.maxReplicas"


def test_status_schema_has_no_defaults() -> None:
    schema = structural_schema(Sample, with_defaults=False)
    assert "default" not in str(schema)


def model_with(annotation: Any, **field: Any) -> type[BaseModel]:
    return type("Wrong", (BaseModel,), {"__annotations__": {"field": annotation}, **field})


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (int | str, r"Wrong\.field: a union"),
        (dict[str, Any], r"Wrong\.field: an open object"),
        (Any, r"Wrong\.field: has no type"),
        (tuple[int, str], r"Wrong\.field: keyword prefixItems"),
        (Annotated[int, Field(gt=1)], r"Wrong\.field: keyword exclusiveMinimum"),
        (Annotated[int, Field(multiple_of=2)], r"Wrong\.field: keyword multipleOf"),
        (set[int], r"Wrong\.field: keyword uniqueItems"),
        (list[Annotated[int, Field(lt=3)]], r"Wrong\.field\[\]: keyword exclusiveMaximum"),
    ],
)
def test_what_has_no_structural_form_is_refused_by_name(annotation: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        structural_schema(model_with(annotation))


def test_optional_field_with_a_default_value_is_refused() -> None:
    with pytest.raises(SchemaError, match="must default to None"):
        structural_schema(model_with(int | None, field=3))


def test_two_models_of_one_name_are_refused() -> None:
    other = type("Scaling", (BaseModel,), {"__annotations__": {"x": int}, "__module__": "elsewhere"})
    with pytest.raises(SchemaError, match="two models of the same name"):
        structural_schema(type("Both", (BaseModel,), {"__annotations__": {"a": Scaling, "b": other}}))
