"""What the parts of all resources are made of: the base model, and bounded values that several of them use."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from specserve_operator.api.engine_flags import EngineArg
from specserve_operator.api.markers import Atomic

Percent = Annotated[int, Field(ge=0, le=100)]
Milliseconds = Annotated[int, Field(ge=1, le=3_600_000)]
Replicas = Annotated[int, Field(ge=0, le=10_000)]
SecretName = Annotated[str, Field(min_length=1, max_length=253)]
EngineArgs = Annotated[tuple[EngineArg, ...], Field(max_length=256), Atomic()]


class ApiModel(BaseModel):
    """Base of all parts of a resource: camelCase outside, unknown fields refused, immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )
