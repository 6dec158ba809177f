"""One pod of a fleet: a control service whose statistics move as if it served, without any request."""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from specserve_protos.v1alpha1 import control_pb2
from specserve_workers.control.drain import DrainState
from specserve_workers.control.engine import EngineNumbers
from specserve_workers.control.runtime_state import RuntimeState, SpeculationControl
from specserve_workers.control.service import PodIdentity
from specserve_workers.control.stats import LatencyHistogram, RequestOutcome, ServingStats
from specserve_workers.speculation.settings import BatchCap, PolicyName, SpeculationSettings
from tests.fakes.engine.behaviour import Behaviour, LiveBehaviour
from tests.fakes.engine.control_faults import SteeredControlService
from tests.fakes.engine.drafting import Drafting

_KV_BYTES_PER_TOKEN: Final = 4096
# Latencies of a third of the requests each, against what the behaviour says.
_SPREAD: Final = (0.8, 1.0, 1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPod:
    """What a fleet is told of a pod.

    Attributes:
        ip: an address of this machine; any of 127.0.0.0/8 is.
        pool: "prefill" or "decode".
        requests_per_second, prompt_tokens, output_tokens: its load.
        max_draft_tokens: 0: it has no drafter.
        behaviour: fields of `Behaviour`; of the faults, those of the control service.
    """

    name: str
    uid: str
    ip: str
    pool: str = "decode"
    revision: str = "r1"
    requests_per_second: float = 1.0
    prompt_tokens: int = 200
    output_tokens: int = 100
    max_draft_tokens: int = 4
    behaviour: Mapping[str, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> tuple[str, ...]:
        """Where it is and who: a pod for which this changes is another pod."""
        return self.name, self.uid, self.ip, self.pool, self.revision


class FleetMember(SteeredControlService):
    """The control service of one pod. What has happened since it was last asked is reckoned when it is asked."""

    def __init__(self, pod: FleetPod, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reckoned_at = clock()
        # Requests that are due, in parts of one.
        self._credit = 0.0
        self._fleet_stats = ServingStats()
        self._fleet_numbers = EngineNumbers(self, activity=lambda: 0)
        self._kv = dict.fromkeys(
            ("remote_prefills", "loaded_tokens", "loaded_bytes", "served_transfers", "served_bytes"), 0
        )
        most = pod.max_draft_tokens if pod.pool == "decode" else 0
        self._drafting = Drafting(started_max_tokens=most)
        settings = SpeculationSettings(policy=PolicyName.DSDE, cap=BatchCap.MEAN, max_tokens=most)
        self._drafting.apply(settings.to_state(), 0)
        self.asked = 0
        self.update(pod)
        super().__init__(
            PodIdentity(name=pod.name, uid=pod.uid, pool=pod.pool, revision=pod.revision),
            stats=self._fleet_stats,
            numbers=self._fleet_numbers,
            speculation=SpeculationControl(settings, started_max_tokens=most, apply=self.set_speculation),
            drain=DrainState(),
            clock=clock,
            behaviour=self._live,
        )

    def update(self, pod: FleetPod) -> None:
        """Takes over another load and behaviour. Raises BehaviourError."""
        self.pod = pod
        self._live = LiveBehaviour(Behaviour().with_fields(pod.behaviour))
        self._behaviour = self._live

    async def GetStats(self, request: Any, context: Any) -> control_pb2.GetStatsResponse:
        self.asked += 1
        self.reckon()
        return await super().GetStats(request, context)

    async def set_speculation(self, state: RuntimeState) -> None:
        """As the engine's control call."""
        self.reckon()
        self._drafting.apply(state.speculation.to_state(), state.generation)

    async def speculation_stats(self) -> Mapping[str, Any]:
        return self._drafting.stats()

    async def kv_stats(self) -> Mapping[str, Any]:
        return self._kv

    def reckon(self) -> None:
        """Counts the requests that have ended since it was last called."""
        now = self._clock()
        self._credit += self.pod.requests_per_second * (now - self._reckoned_at)
        self._reckoned_at = now
        ended = int(self._credit)
        self._credit -= ended
        stats, pod = self._fleet_stats, self.pod
        stats.started += ended
        stats.outcomes[RequestOutcome.SUCCEEDED] += ended
        stats.prompt_tokens += ended * pod.prompt_tokens
        if pod.pool == "decode":
            self._decoded(ended)
        else:
            stats.output_tokens += ended
            self._move(ended, ("served_transfers",), "served_bytes")
        self._fleet_numbers.speculation = self._drafting.stats()
        self._fleet_numbers.kv_transfer = self._kv

    def _decoded(self, ended: int) -> None:
        behaviour, tokens = self._live.now, ended * self.pod.output_tokens
        self._fleet_stats.output_tokens += tokens
        length = self._drafting.length(behaviour.acceptance_ratio)
        steps = round(tokens / (1 + length * behaviour.acceptance_ratio))
        if steps:
            self._drafting.step(length, behaviour.acceptance_ratio, times=steps)
        step_ms = behaviour.time_per_output_token_ms * (1 + length * behaviour.draft_cost_ratio)
        _observe(self._fleet_stats.time_to_first_token, behaviour.time_to_first_token_ms, ended)
        _observe(self._fleet_stats.time_per_output_token, step_ms / (1 + length * behaviour.acceptance_ratio), ended)
        self._move(ended, ("remote_prefills",), "loaded_bytes")
        self._kv["loaded_tokens"] += ended * self.pod.prompt_tokens

    def _move(self, ended: int, counters: tuple[str, ...], total: str) -> None:
        for counter in counters:
            self._kv[counter] += ended
        self._kv[total] += ended * self.pod.prompt_tokens * _KV_BYTES_PER_TOKEN


def _observe(histogram: LatencyHistogram, value_ms: float, times: int) -> None:
    for number, factor in enumerate(_SPREAD):
        count = (times + number) // len(_SPREAD)
        histogram.counts[bisect_left(histogram.bounds_ms, value_ms * factor)] += count
        histogram.sum_ms += value_ms * factor * count
