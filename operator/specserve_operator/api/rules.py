"""Rules over several fields, as CEL expressions that the API server evaluates (`x-kubernetes-validations`).

`RULES` hangs each rule on the model whose fields it compares, where the same rule is stated for use
without an API server. `api/crd.py` writes it wherever that model occurs. How rules may be added later without locking
users out of their own objects is in `api/cel.py`.

Expressions see defaults filled in, and need `has()` only for fields without one. Lists and strings they walk are
bounded in the schema, because the server refuses a rule whose worst case is too costly.
"""

from typing import Final

from pydantic import BaseModel

from specserve_operator.api import pools
from specserve_operator.api import v1alpha1 as api
from specserve_operator.api.cel import Rule


def _may_be_zero(pool: str) -> str:
    return f"(has({pool}.scaling) ? {pool}.scaling.minReplicas == 0 : (has({pool}.replicas) && {pool}.replicas == 0))"


_MIN_MAX_REPLICAS: Final = Rule("self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas")

RULES: Final[dict[type[BaseModel], tuple[Rule, ...]]] = {
    api.SpeculativeService: (
        Rule(
            f"self.metadata.name.size() <= {api.MAX_SERVICE_NAME_LENGTH}",
            f"metadata.name must have at most {api.MAX_SERVICE_NAME_LENGTH} characters:"
            " the names of pods and Services are derived from it",
        ),
        Rule(
            f"self.metadata.name.matches('{api.SERVICE_NAME_PATTERN}')",
            "metadata.name must start with a letter and have only lower-case letters, digits and '-'",
        ),
    ),
    api.SpeculativeServiceSpec: (
        Rule(
            "!has(self.training) || (has(self.speculation)"
            " && self.speculation.draft.method in ['EAGLE3', 'DraftModel'])",
            "training needs speculation with a trainable draft (EAGLE3 or DraftModel)",
        ),
        Rule(
            f"!has(self.prefill) || {_may_be_zero('self.prefill')} == {_may_be_zero('self.decode')}",
            "prefill and decode are scaled to zero together or not at all",
        ),
    ),
    pools.ServingPool: (Rule("!(has(self.replicas) && has(self.scaling))", "replicas and scaling exclude each other"),),
    api.Draft: (
        Rule(
            "has(self.uri) == (self.method != 'NGram')",
            "uri is required, except for method NGram, which has none",
        ),
    ),
    api.Length: (
        Rule("self.min <= self.max", "min must not exceed max"),
        Rule(
            "has(self.tokens) == (self.policy == 'Static')",
            "tokens is required with policy Static, and only there",
        ),
        Rule("!has(self.tokens) || self.tokens <= self.max", "tokens must not exceed max"),
    ),
    pools.Scaling: (_MIN_MAX_REPLICAS,),
    pools.TrainingScaling: (_MIN_MAX_REPLICAS,),
    pools.Rollout: (
        Rule(
            "self.maxUnavailable > 0 || self.maxSurge > 0",
            "maxUnavailable and maxSurge must not both be 0",
        ),
        Rule(
            "self.minReadySeconds < self.progressDeadlineSeconds",
            "minReadySeconds must be less than progressDeadlineSeconds",
        ),
    ),
    api.DraftRevisionSpec: (Rule("self == oldSelf", "a draft revision is immutable"),),
}
