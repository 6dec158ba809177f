"""The engine of a fake pod: takes the time that it is told to, and gives answers that follow from the prompt."""

import argparse
import asyncio
import itertools
import logging
import os
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from tests.fakes.engine.behaviour import LiveBehaviour
from tests.fakes.engine.drafting import Drafting
from tests.fakes.engine.metrics import EngineMetrics
from tests.fakes.engine.stand_ins import FinishedRequest, IterationStats, RequestStatus
from tests.fakes.engine.tokens import answer_words
from tests.fakes.engine.transfer import EngineRequest, KvTransfer

logger = logging.getLogger("vllm.fake")

EXIT_KILLED: Final = 128 + 9
_HANG_POLL_SECONDS: Final = 0.05


class EngineDeadError(RuntimeError):
    """The engine has died, by order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One sequence that is wanted.

    `index` tells the sequences of one request apart. `ends_by_itself`: the answer may end before `max_tokens`.
    """

    prompt_token_ids: Sequence[int]
    max_tokens: int
    index: int = 0
    ends_by_itself: bool = True
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Answer:
    """What is known of a sequence besides its words, once they have ended."""

    finish_reason: str | None = None
    num_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _BlockPool:
    """Indices of free blocks, given out in the order in which they are asked for."""

    num_blocks: int
    free: list[int] = field(default_factory=list)
    _waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))

    async def take(self, count: int) -> list[int]:
        """Waits until there are so many. The caller has seen to it that there can be."""
        entry = (count, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._call_next()
        try:
            await entry[1]
            taken, self.free = self.free[:count], self.free[count:]
        finally:
            self._waiting.remove(entry)
            self._call_next()
        return taken

    def give_back(self, block_ids: Iterable[int]) -> None:
        self.free.extend(block_ids)
        self._call_next()

    def _call_next(self) -> None:
        if self._waiting and len(self.free) >= self._waiting[0][0] and not self._waiting[0][1].done():
            self._waiting[0][1].set_result(None)


class FakeEngine:
    """What the workers call of vLLM's `AsyncLLM`, and `generate` for the fake's own HTTP application."""

    def __init__(self, args: argparse.Namespace, behaviour: LiveBehaviour, *, stat_loggers: Sequence[Any]) -> None:
        start = behaviour.now
        logger.info("the fake engine starts, in %g s", start.startup_seconds)
        # The engine's start holds its caller, as a real one does.
        time.sleep(start.startup_seconds)
        self.model_config = args
        self.vllm_config = argparse.Namespace(cache_config=argparse.Namespace(block_size=args.block_size))
        self.errored = False
        self._args, self._behaviour, self._stat_loggers = args, behaviour, stat_loggers
        self._ballast = b"\x01" * (start.ballast_mib << 20)
        self._pool = _BlockPool(start.kv_cache_blocks)
        self._seats = asyncio.Semaphore(args.max_num_seqs)
        self._readers = asyncio.Semaphore(start.prompts_at_once) if start.prompts_at_once else None
        speculation = args.speculative_config or {}
        self.drafting = Drafting(started_max_tokens=speculation.get("num_speculative_tokens", 0))
        self.metrics = EngineMetrics(args, engine=self)
        self.waiting = self.running = 0
        self._numbers = itertools.count()
        self._transfer = None
        if args.kv_transfer_config:
            self._transfer = KvTransfer(
                args, num_blocks=start.kv_cache_blocks, block_bytes=start.kv_block_bytes, free=self._pool.give_back
            )

    @property
    def kv_cache_usage_ratio(self) -> float:
        return 1 - len(self._pool.free) / self._pool.num_blocks

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache(self) -> None:
        """There is none."""

    def shutdown(self, timeout: float | None = None) -> None:
        if self._transfer is not None:
            self._transfer.close()

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """What the worker class of each rank would answer."""
        if self.errored:
            raise EngineDeadError("the engine is dead")
        calls: dict[str, Callable[..., Any]] = {
            "set_speculation": self.drafting.apply,
            "speculation_stats": self.drafting.stats,
        }
        if method == "kv_stats":
            return self._transfer.rank_stats() if self._transfer is not None else []
        return [calls[method](*args)] * self._args.tensor_parallel_size

    def die(self, *, kill: bool) -> None:
        """Ends the process at once, or leaves it with a dead engine, which it will notice."""
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(EXIT_KILLED)  # the first process of a container cannot kill itself
        self.errored = True
        try:
            raise EngineDeadError("the fake engine was told to die")
        except EngineDeadError:
            logger.exception("the engine's core ended")

    def blocks_needed(self, order: Order) -> int:
        block_size: int = self._args.block_size
        return -(-(len(order.prompt_token_ids) + order.max_tokens) // block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self._pool.num_blocks

    async def generate(
        self, order: Order, answer: Answer, *, is_doomed: bool = False
    ) -> AsyncGenerator[list[str], None]:
        """The words of one sequence, as many at a time as a step gives; `answer` is filled in at the end.

        Closing the iterator or cancelling its task ends the sequence at once.
        """
        arrived = time.monotonic()
        request = EngineRequest(
            f"fake-{next(self._numbers)}", order.prompt_token_ids, kv_transfer_params=order.kv_transfer_params
        )
        async with self._admitted(request, order), self._counted(answer):
            await self._read_prompt(request)
            first_at = time.monotonic()
            self.metrics.observe_first_token(first_at - arrived)
            async with aclosing(self._words(order, answer, is_doomed=is_doomed)) as steps:
                async for words in steps:
                    self._record(IterationStats(num_generation_tokens=len(words)))
                    yield words
            now = time.monotonic()
            mean_seconds = (now - first_at) / (answer.num_tokens - 1) if answer.num_tokens > 1 else 0.0
            self._record(IterationStats(finished_requests=[FinishedRequest(answer.num_tokens, mean_seconds)]))
            self.metrics.observe_finished(mean_seconds, now - arrived)
            is_length = answer.finish_reason == "length"
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED if is_length else RequestStatus.FINISHED_STOPPED
            if self._transfer is not None:
                answer.kv_transfer_params = self._transfer.finish(request)

    @asynccontextmanager
    async def _admitted(self, request: EngineRequest, order: Order) -> AsyncIterator[None]:
        """A seat in the batch and blocks for the whole sequence, which the engine of a real pod takes as it goes."""
        self.waiting += 1
        is_waiting = True
        try:
            async with self._seats:
                request.block_ids = await self._pool.take(self.blocks_needed(order))
                self.waiting -= 1
                self.running += 1
                is_waiting = False
                try:
                    yield
                finally:
                    self.running -= 1
                    self._pool.give_back(request.block_ids)
        finally:
            self.waiting -= is_waiting

    @asynccontextmanager
    async def _counted(self, answer: Answer) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.metrics.count_finished(answer.finish_reason or "abort")

    async def _read_prompt(self, request: EngineRequest) -> None:
        num_tokens = request.num_prompt_tokens
        if self._transfer is not None and await self._transfer.load(request):
            self.drafting.refill(num_tokens)
            await self._sleep_until(time.monotonic() + self._step_seconds(0))
        else:
            async with self._readers or nullcontext():
                now = self._behaviour.now
                milliseconds = now.time_to_first_token_ms
                milliseconds += now.time_to_first_token_ms_per_thousand_tokens * num_tokens / 1000
                await self._sleep_until(time.monotonic() + milliseconds / 1000)
            if self._transfer is not None:
                self._transfer.write_prompt(request)
        self._record(IterationStats(num_prompt_tokens=num_tokens))

    async def _words(self, order: Order, answer: Answer, *, is_doomed: bool) -> AsyncGenerator[list[str], None]:
        most = order.max_tokens
        if order.ends_by_itself:
            most = min(most, self._behaviour.now.answer_tokens)
        words = answer_words(order.prompt_token_ids, index=order.index)
        count, due = 1, time.monotonic()
        while True:
            now = self._behaviour.now
            if is_doomed and answer.num_tokens >= now.crash_after_tokens:
                self.die(kill=now.crash == "kill")
            if self.errored:
                raise EngineDeadError("the engine is dead")
            answer.num_tokens += count
            yield list(itertools.islice(words, count))
            if answer.num_tokens >= most:
                answer.finish_reason = "length" if most == order.max_tokens else "stop"
                return
            length = min(self.drafting.length(now.acceptance_ratio), most - answer.num_tokens)
            due += self._step_seconds(length)
            await self._sleep_until(due)
            count = min(1 + self.drafting.step(length, now.acceptance_ratio), most - answer.num_tokens)

    def _step_seconds(self, draft_length: int) -> float:
        now = self._behaviour.now
        others = max(0, self.running - 1)
        step_ms = now.time_per_output_token_ms * (1 + now.slowdown_ratio * others)
        return step_ms * (1 + now.draft_cost_ratio * draft_length) / 1000

    async def _sleep_until(self, due: float) -> None:
        """Times are kept on the whole, however late single wake-ups are."""
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        while self._behaviour.now.hang_requests and not self.errored:  # noqa: ASYNC110 - no one to set an event
            await asyncio.sleep(_HANG_POLL_SECONDS)

    def _record(self, stats: IterationStats) -> None:
        self.metrics.record(stats)
        for stat_logger in self._stat_loggers:
            stat_logger.record(None, stats)
