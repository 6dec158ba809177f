"""How a fake pod behaves: its speed, its size and its faults, and where they are read from."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import grpc

FILE_VARIABLE: Final = "SPECSERVE_FAKE_FILE"
VARIABLE: Final = "SPECSERVE_FAKE"
ENGINE_ARGUMENT: Final = "--fake"
POOLS: Final = ("prefill", "decode")


class BehaviourError(ValueError):
    """A behaviour that there is none of. Names the field or the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One pod's behaviour. Times are those of an idle pod; a default is that of a pod in good health.

    What is under Size and Start, and `prompts_at_once`, is read at the start only.

    Speed:
        time_to_first_token_ms: reading a prompt; on a decode pod only of prompts that it reads by itself.
        time_to_first_token_ms_per_thousand_tokens: what the prompt's length adds.
        prompts_at_once: prompts that are read at the same time, more wait; 0: as many as there are.
        time_per_output_token_ms: one step without drafts: an observed time per output token is shorter with drafts.
        slowdown_ratio: how much longer a step takes with each further sequence that runs.
        draft_cost_ratio: time of one draft pass, in steps.
        acceptance_ratio: share of the draft tokens that are accepted.
        answer_tokens: where an answer ends by itself, if `max_tokens` and `ignore_eos` let it.

    Size:
        kv_cache_blocks: blocks of the KV cache; requests that find none wait.
        kv_block_bytes: bytes of a block, of each of two layers.
        ballast_mib: memory that the process holds besides its own.

    Start:
        startup_seconds: how long the engine takes to start.
        startup_error: the pod ends with this line instead, exit code 1.

    Faults:
        ready, healthy: False: 503 to /ready, to /health.
        error_ratio, error_status: share of the completions that are refused, and with what.
        hang_requests: no token comes any more; probes are answered.
        hang_http, hang_control: no HTTP request but /fake, no call of the control service is answered.
        crash_after_requests: the n-th completion from now on ends the pod; 0: none does.
        crash_after_tokens: ... after it has given so many tokens.
        crash: "kill": the process is gone at once. "engine": its engine has died, of which it says so and ends.
        kv_refuse: gRPC status by which every fetch of KV is refused, such as "RESOURCE_EXHAUSTED"; empty: none.
        kv_corrupt: "wire": bytes are damaged on their way. "content": blocks are those of another prompt.
        kv_delay_ms: pause before every chunk of KV that is sent.
        ignore_sigterm: the signal to stop does nothing.
        stats: fields of `GetStatsResponse`, in its JSON form, that replace the true ones.
        stats_error: gRPC status by which every `GetStats` is refused; empty: none.
    """

    time_to_first_token_ms: float = 20.0
    time_to_first_token_ms_per_thousand_tokens: float = 0.0
    prompts_at_once: int = 0
    time_per_output_token_ms: float = 5.0
    slowdown_ratio: float = 0.0
    draft_cost_ratio: float = 0.1
    acceptance_ratio: float = 0.7
    answer_tokens: int = 256
    kv_cache_blocks: int = 4096
    kv_block_bytes: int = 256
    ballast_mib: int = 0
    startup_seconds: float = 0.0
    startup_error: str = ""
    ready: bool = True
    healthy: bool = True
    error_ratio: float = 0.0
    error_status: int = 500
    hang_requests: bool = False
    hang_http: bool = False
    hang_control: bool = False
    crash_after_requests: int = 0
    crash_after_tokens: int = 0
    crash: str = "kill"
    kv_refuse: str = ""
    kv_corrupt: str = ""
    kv_delay_ms: float = 0.0
    ignore_sigterm: bool = False
    stats: Mapping[str, Any] = field(default_factory=dict)
    stats_error: str = ""

    def __post_init__(self) -> None:
        """Raises BehaviourError naming the first field that is out of its range."""
        for name in ("acceptance_ratio", "error_ratio"):
            if getattr(self, name) > 1:
                raise BehaviourError(f"{name}: {getattr(self, name)} is not in 0-1")
        for name, allowed in (("crash", ("kill", "engine")), ("kv_corrupt", ("", "wire", "content"))):
            if getattr(self, name) not in allowed:
                raise BehaviourError(f"{name}: {getattr(self, name)!r} is none of {allowed}")
        for name in ("kv_refuse", "stats_error"):
            if getattr(self, name) and getattr(self, name) not in grpc.StatusCode.__members__:
                raise BehaviourError(f"{name}: {getattr(self, name)!r} is no gRPC status")
        for name in ("kv_cache_blocks", "kv_block_bytes", "answer_tokens"):
            if getattr(self, name) < 1:
                raise BehaviourError(f"{name}: {getattr(self, name)} is below 1")
        if not 400 <= self.error_status <= 599:
            raise BehaviourError(f"error_status: {self.error_status} is not in 400-599")

    def with_fields(self, fields: Mapping[str, Any]) -> "Behaviour":
        """This behaviour with some fields replaced. Raises BehaviourError naming a field that cannot be."""
        return dataclasses.replace(self, **{name: _checked(name, value) for name, value in fields.items()})


_DEFAULTS: Final = Behaviour()


def _checked(name: str, value: Any) -> Any:
    if name not in Behaviour.__dataclass_fields__:
        raise BehaviourError(f"{name}: no field of a fake pod's behaviour")
    default = getattr(_DEFAULTS, name)
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise BehaviourError(f"{name}: {value!r} is no {kind.__name__}")
    if kind in (int, float) and not value >= 0:
        raise BehaviourError(f"{name}: {value} is below 0")
    return value


def start_behaviour(pool: str, argv: Sequence[str], *, environ: Mapping[str, str]) -> Behaviour:
    """The behaviour that a pod of this pool is started with. Raises BehaviourError naming the source."""
    behaviour = Behaviour()
    for source, text in _sources(argv, environ):
        try:
            document = json.loads(text)
            if not isinstance(document, dict):
                raise BehaviourError("not a JSON object")
            sections = {name: document.pop(name, {}) for name in POOLS}
            behaviour = behaviour.with_fields(document | sections[pool])
        except (ValueError, TypeError) as error:
            raise BehaviourError(f"{source}: {error}") from error
    return behaviour


def _sources(argv: Sequence[str], environ: Mapping[str, str]) -> list[tuple[str, str]]:
    sources = []
    if path := environ.get(FILE_VARIABLE):
        try:
            sources.append((path, Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise BehaviourError(f"{FILE_VARIABLE}: {path} cannot be read: {error.strerror}") from error
    if text := environ.get(VARIABLE):
        sources.append((VARIABLE, text))
    for argument, value in pairwise(argv):
        if argument == ENGINE_ARGUMENT:
            sources.append((ENGINE_ARGUMENT, value))
    return sources


class LiveBehaviour:
    """The behaviour of a running pod. Read from several threads, changed by one."""

    def __init__(self, start: Behaviour) -> None:
        self._start = start
        self.now = start
        # Completions since `crash_after_requests` was last said.
        self.counted_requests = 0

    def update(self, fields: Mapping[str, Any]) -> None:
        """Raises BehaviourError, and then changes nothing."""
        self.now = self.now.with_fields(fields)
        if "crash_after_requests" in fields:
            self.counted_requests = 0

    def reset(self) -> None:
        self.now = self._start
        self.counted_requests = 0

    def is_doomed(self) -> bool:
        """Counts a completion; True for the one that the pod is to end with."""
        self.counted_requests += 1
        return self.counted_requests == self.now.crash_after_requests
