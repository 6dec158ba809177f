"""A validation rule in CEL, as the API server evaluates it.

**Old objects stay editable.** A server since Kubernetes 1.30 does not report a rule on a part that an update leaves as
it was, so a rule belongs on the smallest part that has its fields. That alone is not enough for the big ones (`spec`
differs in every update): a rule that is added after a release must be `ratcheting`. It then refuses an update only if
the old object kept the rule, so that an object that broke it before may still be changed, within the same part too.
"""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """One CEL rule. `expression` is true where `self` is right; `message` says what is wrong where it is not.

    `message_expression` is CEL for a message with values in it; `message` is what it falls back to. The expression of a
    `ratcheting` rule may not mention `oldSelf`.
    """

    expression: str
    message: str
    message_expression: str = ""
    ratcheting: bool = False

    def to_schema(self) -> dict[str, Any]:
        """The entry of `x-kubernetes-validations`."""
        entry: dict[str, Any] = {"rule": self.expression, "message": self.message}
        if self.message_expression:
            entry["messageExpression"] = self.message_expression
        if self.ratcheting:
            old = re.sub(r"\bself\b", "oldSelf.value()", self.expression)
            entry["rule"] = f"({self.expression}) || (oldSelf.hasValue() && !({old}))"
            entry["optionalOldSelf"] = True
        return entry
