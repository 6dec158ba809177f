"""What may change in running pods: the run-time state of docs/contracts.md, from the spec."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard

from specserve_operator.api.v1alpha1 import LengthCap, LengthPolicy, SpeculationMode, SpeculativeService
from specserve_operator.constants import RUNTIME_FILE
from specserve_operator.core.names import runtime_config_name
from specserve_operator.core.objects import Manifest

STATE_VERSION = 1
MAX_GENERATION = 2**53  # what every reader of JSON knows exactly
POLICY_OFF = "Off"


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """Lengths in draft tokens a sequence and step. `generation` goes up with every change of the settings.

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


def is_generation(value: object) -> TypeGuard[int]:
    """Whether a pod would take the number."""
    return type(value) is int and 0 <= value <= MAX_GENERATION


def plan_runtime_state(
    service: SpeculativeService, children: Iterable[Manifest], *, in_force: Iterable[int] = ()
) -> RuntimeState:
    """The settings that the spec asks for. Those that `children` hold already keep their generation.

    So a change of anything else is no news to the pods. Other settings are of the spec's generation, or a later one:
    pods refuse what is older than what they have, be it that of a service which had this name before. `in_force`: the
    generations that pods say they have.
    """
    asked, name = _asked_settings(service), runtime_config_name(service.metadata.name)
    found = next((c for c in children if (c["kind"], c["metadata"]["name"]) == ("ConfigMap", name)), {})
    text = (found.get("data") or {}).get(RUNTIME_FILE, "")
    held = _generation(text)
    newest = max((number for number in in_force if number < MAX_GENERATION), default=0)
    kept = replace(asked, generation=held)
    if held >= newest and kept.to_json() == text:
        return kept
    return replace(asked, generation=max(asked.generation, held + 1, newest + 1))


def _generation(text: str) -> int:
    """Of a state file; 0 if it is none, or has a number that cannot be of ours, or has no next one."""
    try:
        number = json.loads(text)["generation"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0
    return number if is_generation(number) and number < MAX_GENERATION else 0


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
