"""What may change in running pods: the run-time state of docs/contracts.md, from the spec."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from specserve_operator.api.v1alpha1 import LengthCap, LengthPolicy, SpeculationMode, SpeculativeService
from specserve_operator.constants import RUNTIME_FILE
from specserve_operator.core.names import runtime_config_name
from specserve_operator.core.objects import Manifest

STATE_VERSION = 1
POLICY_OFF = "Off"


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """Lengths in draft tokens a sequence and step. `generation` is that of the spec that first asked for the settings.

    `policy` is `Off`, `Static` or `DSDE`; `cap` is `None` or `Mean`.
    """

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


def plan_runtime_state(service: SpeculativeService, children: Iterable[Manifest]) -> RuntimeState:
    """The settings that the spec asks for. Those that `children` hold already keep their generation.

    So a change of anything else is no news to the pods.
    """
    asked, name = _asked_settings(service), runtime_config_name(service.metadata.name)
    held = next((c for c in children if (c["kind"], c["metadata"]["name"]) == ("ConfigMap", name)), {})
    text = (held.get("data") or {}).get(RUNTIME_FILE, "")
    kept = replace(asked, generation=min(max(_generation(text), 0), asked.generation))
    return kept if kept.to_json() == text else asked


def _generation(text: str) -> int:
    """Of a state file; 0 if it is none."""
    try:
        return int(json.loads(text)["generation"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return 0


def _asked_settings(service: SpeculativeService) -> RuntimeState:
    """`mode: Never` and `rolloutPercent: 0` keep the lengths and turn them off."""
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
