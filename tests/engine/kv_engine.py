"""An engine that is producer and consumer of KV at once and pulls from itself over gRPC."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from specserve_workers.kv.client import KvClient
from specserve_workers.kv.config import kv_transfer_config
from specserve_workers.kv.errors import ProducerError, StalledError
from tests.engine.conftest import Engine, Models, start_engine, stop_engine

BLOCK_TOKENS = 32
LEASE_SECONDS = 3.0


@dataclass(slots=True)
class KvEngine(Engine):
    """Remembers the transfer parameters of finished requests, and why they finished."""

    params: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.outputs[output.request_id] = list(output.outputs[0].token_ids)
                self.params[output.request_id] = output.kv_transfer_params
                self.reasons[output.request_id] = output.outputs[0].finish_reason

    def hold(self, prompt: Sequence[int], *, pulls: int = 1) -> dict[str, Any]:
        """Prefill a prompt and return where its KV is held."""
        params = {"do_remote_decode": True, "pulls": pulls}
        name = self.submit(prompt, max_tokens=1, extra_args={"kv_transfer_params": params})
        self.run()
        held = self.params[name]
        assert held is not None
        return held

    def decode(
        self, prompts: Sequence[Sequence[int]], sources: Sequence[dict[str, Any] | None], *, max_tokens: int
    ) -> list[list[int]]:
        """Texts of prompts, as one batch, each with its source of KV."""
        names = []
        for prompt, source in zip(prompts, sources, strict=True):
            extra_args = {"kv_transfer_params": dict(source)} if source else {}
            names.append(self.submit(prompt, max_tokens=max_tokens, extra_args=extra_args))
        self.run()
        return [self.outputs[name] for name in names]

    def start(self, prompt: Sequence[int], source: dict[str, Any] | None, *, salt: str, max_tokens: int) -> str:
        """Add a request that shares cached blocks only with those of its salt. Returns its name."""
        from vllm import SamplingParams

        self._requests += 1
        name = f"salted-{self._requests}"
        extra_args = {"kv_transfer_params": dict(source)} if source else {}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra_args
        )
        salted = {"prompt_token_ids": list(prompt), "cache_salt": salt}
        self.llm.llm_engine.add_request(name, salted, sampling)
        return name

    def num_output_tokens(self, name: str) -> int:
        """Tokens that a running request has so far."""
        request = next((r for r in self.scheduler.requests.values() if r.request_id.startswith(name)), None)
        return 0 if request is None else request.num_output_tokens

    def kv_stats(self) -> dict[str, Any]:
        return self.call("kv_stats")

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def step_until(self, condition: Callable[[], object], *, seconds: float = 20.0) -> None:
        """Step the engine, which has no request to finish, until something is so."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.llm.llm_engine.engine_core.get_output()

    def settle(self) -> None:
        """Step until no prompt is held: nothing may be left of a test."""
        self.step_until(lambda: not self.scheduler.has_requests())
        assert self.kv_stats()["open_leases"] == 0


@dataclass(slots=True)
class Change:
    """How the engine's numbers changed since it was made."""

    engine: KvEngine
    before: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.engine.kv_stats()

    def __getitem__(self, name: str) -> Any:
        now, then = self.engine.kv_stats()[name], self.before[name]
        if isinstance(now, dict):
            return {key: now[key] - then.get(key, 0) for key in now if now[key] != then.get(key, 0)}
        return now - then


def free_port() -> int:
    """A port that is free together with the next one, for a second rank."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


@contextmanager
def running_engine(
    models: Models,
    *,
    with_draft: bool = False,
    on_failure: Any = "Recompute",
    identity: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[KvEngine]:
    """Start an engine that pulls from itself; in plaintext without `identity`. The draft, if any, is the target."""
    from vllm.config import KVTransferConfig

    config = kv_transfer_config(
        "decode",
        host="127.0.0.1",
        port=free_port(),
        lease_seconds=LEASE_SECONDS,
        connect_timeout_ms=5000,
        stall_timeout_ms=5000,
        target_revision="test",
        on_failure=on_failure,
        **(identity or {}),
    )
    options = {"enable_prefix_caching": False, "max_num_seqs": 8, **options}
    draft = models.target if with_draft else None
    engine = start_engine(
        models, draft=draft, kv_transfer_config=KVTransferConfig(**config | {"kv_role": "kv_both"}), **options
    )
    try:
        yield KvEngine(engine.llm)
    finally:
        stop_engine(engine)


@contextmanager
def failing_pulls(leases: set[bytes], *, when: str) -> Iterator[None]:
    """Let the pulls of these leases fail: before a byte, with garbage already written, or a while later."""
    fetch = KvClient.fetch

    def failing_fetch(self: KvClient, order: Any, **kwargs: Any) -> int:
        if order.lease not in leases:
            return fetch(self, order, **kwargs)
        self.release(order.address, order.lease, pulls=0)
        if when != "at once":
            layer = self._blocks.layouts[0]
            self._blocks.scatter(0, order.block_ids, b"\x7f" * (layer.block_bytes * len(order.block_ids)))
        if when == "late":
            time.sleep(0.3)
            raise StalledError("test")
        raise ProducerError("test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvClient, "fetch", failing_fetch)
        yield
