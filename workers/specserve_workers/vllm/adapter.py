"""The one place that knows where vLLM's V1 model runner can be held: installs the hooks and proves that they are in.

A hook that is missing would not fail, it would serve without control. So everything that the hooks rely on is checked
when the worker starts, and `HookError` stops it. Another runner (vLLM's V2) would be a second class with these methods.
"""

import inspect
import logging
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specserve_workers.kv.foreign_blocks import set_foreign_block_listener
from specserve_workers.speculation.controller import Batch, SpeculationController
from specserve_workers.speculation.draft_kv import DraftKvLedger
from specserve_workers.speculation.settings import parse_settings
from specserve_workers.vllm.compat import is_expansion_broken, repair_expansion, replace_placeholder_drafts
from specserve_workers.vllm.drafter import ControlledDraftModelProposer
from specserve_workers.vllm.sampler import DraftLogits, WatchedRejectionSampler

logger = logging.getLogger(__name__)

# Parameters of the engine's functions that are overridden or called by position.
EXPECTED_PARAMETERS: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (
        SpecDecodeBaseProposer.propose,
        (
            "self",
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "token_indices_to_sample",
            "common_attn_metadata",
            "sampling_metadata",
            "mm_embed_inputs",
            "num_rejected_tokens_gpu",
            "slot_mappings",
        ),
    ),
    (SpecDecodeBaseProposer._sample_draft_tokens, ("self", "hidden_states", "sampling_metadata")),
    (SpecDecodeBaseProposer._sample_from_logits, ("self", "logits", "sampling_metadata")),
    (SpecDecodeBaseProposer._get_slot_mapping, ("self", "num_tokens", "slot_mapping")),
    (
        SpecDecodeBaseProposer.build_model_inputs_first_pass,
        ("self", "num_tokens", "num_input_tokens", "mm_embed_inputs"),
    ),
    (RejectionSampler.forward, ("self", "metadata", "draft_probs", "logits", "sampling_metadata")),
    (GPUModelRunner.take_draft_token_ids, ("self",)),
)


class HookError(RuntimeError):
    """The speculation hooks do not fit this engine; it must not serve."""


class V1Hooks:
    """Hooks into one worker's V1 model runner. `install` after the runner exists, `verify` before serving."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._draft_logits = DraftLogits()
        self._ledger_ready = False
        config = worker.vllm_config.speculative_config
        self._config = config
        self._has_drafter = config is not None
        # Models with a recurrent state keep it differently for speculative steps.
        self._plain_steps = not worker.vllm_config.model_config.has_inner_state
        self.controller = SpeculationController(
            started_max_tokens=config.num_speculative_tokens if config is not None else 0
        )

    def install(self) -> None:
        """Takes over the drafter and the sampler. Raises HookError."""
        check_engine(self._worker)
        if not self._has_drafter:
            return
        runner = self._worker.model_runner
        group = get_tp_group()
        if group.world_size > 1:
            self.controller.share = _share_from_first_rank(group)
        if self._worker.device.type == "cpu":
            repair_expansion()
        runner.drafter.__class__ = ControlledDraftModelProposer
        runner.drafter.take_control(self.controller, runner=runner, draft_logits=self._draft_logits)
        runner.rejection_sampler = WatchedRejectionSampler(
            runner.rejection_sampler,
            self.controller,
            input_batch=runner.input_batch,
            draft_logits=self._draft_logits,
            measures=group.rank_in_group == 0,
        )

    def use_kv_cache(self, kv_cache_config: Any) -> None:
        """The KV cache exists: marks of its blocks begin, all without draft KV."""
        if not self._has_drafter:
            return
        if self._worker.model_runner.drafter.kv_cache_gid != 0:
            # The runner gives the drafter the metadata of the first group, so marks of another's blocks would be wrong.
            raise HookError("the draft's KV cache must be in the first group; this pair of models is not supported")
        block_size = self._block_table().block_size
        ledger = DraftKvLedger(kv_cache_config.num_blocks, block_size)
        self.controller.use_ledger(ledger)
        set_foreign_block_listener(ledger.mark_foreign)
        # The runner makes a new input batch when block sizes differ from its first guess.
        self._worker.model_runner.rejection_sampler.watch(self._worker.model_runner.input_batch)
        self._ledger_ready = True

    def verify(self) -> None:
        """Raises HookError unless every hook is in its place."""
        if not self._has_drafter:
            logger.info("speculation: no drafter; lengths cannot be set before a restart with one")
            return
        runner = self._worker.model_runner
        if not isinstance(runner.drafter, ControlledDraftModelProposer):
            raise HookError(f"the drafter was replaced by {type(runner.drafter).__name__} after start")
        if not isinstance(runner.rejection_sampler, WatchedRejectionSampler):
            raise HookError(f"the sampler was replaced by {type(runner.rejection_sampler).__name__} after start")
        if not self._ledger_ready:
            raise HookError("the KV cache was set up without the draft KV marks")
        leave_out_draft_attention(runner)
        if self._worker.device.type == "cpu":
            from vllm.v1.sample import rejection_sampler

            if is_expansion_broken(rejection_sampler.expand_batch_to_tokens):
                raise HookError("verification of sampled requests is broken in this engine build")
        logger.info(
            "speculation: hooks installed in %s (V1 runner, synchronous scheduling), up to %d draft tokens",
            type(runner).__name__,
            self.controller.started_max_tokens,
        )

    def before_forward(self, scheduler_output: Any) -> None:
        """The engine is about to run a step."""
        if not self._has_drafter:
            return
        finished, resumed = scheduler_output.finished_req_ids, scheduler_output.scheduled_cached_reqs.resumed_req_ids
        preempted = scheduler_output.preempted_req_ids or ()
        if finished or resumed or preempted:
            self.controller.end_sequences(finished, displaced=(*preempted, *resumed))
        if scheduler_output.scheduled_spec_decode_tokens:
            replace_placeholder_drafts(scheduler_output.scheduled_spec_decode_tokens)
        plain = self._plain_steps and self.controller.is_off and not scheduler_output.scheduled_spec_decode_tokens
        # With a speculative config the runner verifies and prepares drafting in every step, drafts or not. It looks at
        # this attribute anew in each, first in its forward and last when it would draft.
        self._worker.model_runner.speculative_config = None if plain else self._config

    def after_forward(self, scheduler_output: Any) -> None:
        """The target's forward of the step has been issued."""
        if not self._has_drafter or not scheduler_output.total_num_scheduled_tokens:
            return
        runner = self._worker.model_runner
        ids = tuple(runner.input_batch.req_ids)
        starts = runner.input_batch.num_computed_tokens_cpu[: len(ids)].tolist()
        scheduled = scheduler_output.num_scheduled_tokens
        ends = [start + scheduled[sequence_id] for sequence_id, start in zip(ids, starts, strict=True)]
        self.controller.begin_step(Batch(ids, self._block_table().get_numpy_array(), starts, ends))
        if runner.speculative_config is None:
            self.controller.counters.steps_without_draft += 1

    def cut(self, drafts: Any) -> Any:
        """Each request's own number of drafts; `drafts` is the engine's `DraftTokenIds` or None."""
        if not self._has_drafter:
            return drafts
        self._worker.model_runner.rejection_sampler.collect()
        if drafts is None:
            return None
        cut = self.controller.cut(drafts.req_ids, drafts.draft_token_ids)
        return type(drafts)(list(drafts.req_ids), cut)

    def set_speculation(self, settings: dict[str, Any], generation: int) -> dict[str, Any]:
        """Applies the `speculation` object of a run-time state; see `launch` for the result."""
        applied = self.controller.apply(parse_settings(settings), generation)
        return {
            "applied": applied,
            "generation": self.controller.generation,
            "in_force": self.controller.settings.to_state(),
        }

    def _block_table(self) -> Any:
        runner = self._worker.model_runner
        return runner.input_batch.block_table[runner.drafter.kv_cache_gid]


def leave_out_draft_attention(runner: Any) -> None:
    """Attention metadata of the target's forward are built for the target's layers only.

    The runner builds them for the draft's too, in every step. Nobody reads these: the drafter builds its own for each
    of its passes.
    """
    if not hasattr(runner, "attn_groups") or not hasattr(runner.drafter, "draft_attn_groups"):
        raise HookError("the model runner of this vLLM keeps attention groups elsewhere")
    draft_layers = _layer_names(runner.drafter.draft_attn_groups)
    before = _layer_names(chain.from_iterable(runner.attn_groups))
    runner.attn_groups = [
        [group for group in groups if not draft_layers.issuperset(group.layer_names)] for groups in runner.attn_groups
    ]
    after = _layer_names(chain.from_iterable(runner.attn_groups))
    if not after or before - after - draft_layers:
        raise HookError("attention groups of this engine cannot be told apart by model")


def _layer_names(groups: Iterable[Any]) -> set[str]:
    return {name for group in groups for name in group.layer_names}


def check_engine(worker: Any) -> None:
    """Raises HookError if the hooks cannot control this engine."""
    runner = worker.model_runner
    if not isinstance(runner, GPUModelRunner):
        raise HookError(
            f"model runner {type(runner).__module__}.{type(runner).__name__} is not vLLM's V1 runner; "
            "start the engine with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    config = worker.vllm_config.speculative_config
    if config is None:
        return
    for reason, refused in _refusals(worker, config):
        if refused:
            raise HookError(reason)
    for function, expected in EXPECTED_PARAMETERS:
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            raise HookError(
                f"{function.__qualname__} of this vLLM takes {', '.join(found)}; "
                f"the hooks are written for {', '.join(expected)}"
            )
    for name in ("discard_request_mask", "input_batch", "rejection_sampler"):
        if not hasattr(runner, name):
            raise HookError(f"the model runner of this vLLM has no {name!r}")


def _refusals(worker: Any, config: Any) -> list[tuple[str, bool]]:
    runner, parallel = worker.model_runner, worker.vllm_config.parallel_config
    drafter = getattr(runner, "drafter", None)
    kind = type(drafter)
    return [
        (
            f"drafter {kind.__name__} (method {config.method}) is not one the hooks can drive; use method draft_model",
            kind not in (DraftModelProposer, ControlledDraftModelProposer),
        ),
        (
            "asynchronous scheduling bypasses per-sequence draft lengths; start with --no-async-scheduling",
            bool(getattr(runner, "use_async_scheduling", False)),
        ),
        (
            "pipeline parallelism with a drafter is not supported; set --pipeline-parallel-size 1",
            parallel.pipeline_parallel_size > 1,
        ),
        (
            "data parallelism inside one engine is not supported with a drafter; use more decode replicas",
            parallel.data_parallel_size > 1,
        ),
        (
            "decode context parallelism is not supported with a drafter",
            parallel.decode_context_parallel_size > 1,
        ),
        ("parallel drafting is not supported", bool(config.parallel_drafting)),
        ("a draft with another vocabulary is not supported", bool(config.use_heterogeneous_vocab)),
        (
            "num_speculative_tokens_per_batch_size contradicts per-sequence lengths; leave it out",
            config.num_speculative_tokens_per_batch_size is not None,
        ),
    ]


def _share_from_first_rank(group: Any) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Broadcast of a small integer array within the tensor-parallel group, on the host."""

    def share(array: NDArray[np.int64]) -> NDArray[np.int64]:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        torch.distributed.broadcast(tensor, src=group.ranks[0], group=group.cpu_group)
        return tensor.numpy()

    return share
