"""What may change in running pods: the run-time state of docs/contracts.md, from the spec."""

import json
from dataclasses import dataclass

from specserve_operator.api.v1alpha1 import LengthCap, LengthPolicy, SpeculationMode, SpeculativeService

STATE_VERSION = 1
POLICY_OFF = "Off"


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """Lengths in draft tokens a sequence and step. `policy` is `Off`, `Static` or `DSDE`; `cap` is `None` or `Mean`."""

    generation: int
    policy: str = POLICY_OFF
    cap: str = str(LengthCap.NONE)
    min_tokens: int = 0
    max_tokens: int = 0
    static_tokens: int = 0

    def to_json(self) -> str:
        """The content of the state file."""
        speculation = {
            "policy": self.policy,
            "cap": self.cap,
            "minTokens": self.min_tokens,
            "maxTokens": self.max_tokens,
            "staticTokens": self.static_tokens,
        }
        state = {"version": STATE_VERSION, "generation": self.generation, "speculation": speculation}
        return json.dumps(state, indent=1) + "\n"


def plan_runtime_state(service: SpeculativeService) -> RuntimeState:
    """The settings that the spec asks for. `mode: Never` and `rolloutPercent: 0` keep the lengths and turn them off."""
    generation, speculation = service.metadata.generation, service.spec.speculation
    if speculation is None:
        return RuntimeState(generation)
    length = speculation.length
    is_off = speculation.mode is SpeculationMode.NEVER or speculation.rollout_percent == 0
    return RuntimeState(
        generation=generation,
        policy=POLICY_OFF if is_off else str(length.policy),
        cap=str(length.cap) if length.policy is LengthPolicy.DSDE else str(LengthCap.NONE),
        min_tokens=length.min,
        max_tokens=length.max,
        static_tokens=length.tokens or 0,
    )
