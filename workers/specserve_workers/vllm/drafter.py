"""The engine's draft-model proposer with our decisions: how many passes, and what must be fed before them."""

from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from specserve_workers.speculation.controller import SpeculationController
from specserve_workers.speculation.draft_kv import Gap, split_gaps
from specserve_workers.vllm.sampler import DraftLogits


class ControlledDraftModelProposer(DraftModelProposer):
    """Takes the place of `DraftModelProposer` (by `__class__`) once the engine has made one.

    `take_control` must be called before anything is proposed.
    """

    def take_control(self, controller: SpeculationController, *, runner: Any, draft_logits: DraftLogits) -> None:
        self._controller = controller
        self._controlled_runner = runner
        self._kept = draft_logits

    def propose(  # noqa: PLR0917 - the engine's own signature
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Drafts [rows, passes of the plan]. `num_speculative_tokens`, the engine's own wish, is its upper bound."""
        controller, runner = self._controller, self._controlled_runner
        rows = common_attn_metadata.batch_size()
        self._kept.clear()
        self._last_draft_probs = None
        plan = controller.plan(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
        if not plan.runs_draft:
            controller.counters.steps_without_draft += 1
            return torch.empty(rows, 0, device=self.device, dtype=torch.int64)
        for gaps in split_gaps(plan.gaps, self.max_num_tokens):
            self._feed(gaps, common_attn_metadata)
        passes = min(plan.passes, num_speculative_tokens)
        drafts = super().propose(
            passes,
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            mm_embed_inputs,
            num_rejected_tokens_gpu,
            slot_mappings,
        )
        controller.counters.draft_forwards += max(passes, 1)
        if self._kept.passes:
            self._kept.rows = {sequence_id: row for row, sequence_id in enumerate(runner.input_batch.req_ids)}
        controller.drafted()
        return drafts

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One pass's tokens, as the engine chooses them; keeps the logits where divergences are measured."""
        if not self._controller.measures_kld:
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        logits = self.model.compute_logits(hidden_states)
        # Sampling scales the logits in place, argmax leaves them alone.
        self._kept.passes.append(logits if sampling_metadata.all_greedy else logits.clone())
        return self._sample_from_logits(logits, sampling_metadata)

    def _feed(self, gaps: list[Gap], batch: CommonAttentionMetadata) -> None:
        """One pass of the draft model over tokens it has missed: writes their KV, its output is not used."""
        metadata, token_ids, positions = self._gap_inputs(gaps, batch)
        _, per_layer = self.build_per_group_and_layer_attn_metadata(metadata)
        count = metadata.num_actual_tokens
        mode, padded, across_dp = self._determine_batch_execution_and_padding(count)
        self.input_ids[:count] = token_ids
        self._set_positions(count, positions)
        inputs, slots = self.build_model_inputs_first_pass(count, padded, None)
        with set_forward_context(
            per_layer,
            self.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across_dp,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(slots, metadata.slot_mapping),
        ):
            self.model(**inputs)
        self._controller.counters.draft_forwards += 1

    def _gap_inputs(
        self, gaps: list[Gap], batch: CommonAttentionMetadata
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]:
        """Attention metadata, token ids and positions of one pass over `gaps`."""
        tokens = self._controlled_runner.input_batch.token_ids_cpu
        lengths = np.array([gap.end - gap.start for gap in gaps], dtype=np.int32)
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ends = np.array([gap.end for gap in gaps], dtype=np.int32)
        rows = np.array([gap.row for gap in gaps], dtype=np.int64)
        token_ids = np.concatenate([tokens[gap.row, gap.start : gap.end] for gap in gaps]).astype(np.int32)
        positions_np = np.concatenate([np.arange(gap.start, gap.end, dtype=np.int64) for gap in gaps])
        positions = self._on_device(positions_np)
        block_table = batch.block_table_tensor[self._on_device(rows)]
        owner = self._on_device(np.repeat(np.arange(len(gaps), dtype=np.int64), lengths))
        slots = block_table[owner, positions // self.block_size].long() * self.block_size
        ends_cpu = torch.from_numpy(ends)
        metadata = CommonAttentionMetadata(
            query_start_loc=self._on_device(bounds),
            query_start_loc_cpu=torch.from_numpy(bounds),
            seq_lens=self._on_device(ends),
            seq_lens_cpu_upper_bound=ends_cpu,
            num_reqs=len(gaps),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=block_table,
            slot_mapping=slots + positions % self.block_size,
            causal=True,
        )
        return metadata, self._on_device(token_ids), positions

    def _on_device(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            # The engine changes metadata in place between passes; the arrays here are shared by several of them.
            return tensor.clone()
        return tensor.pin_memory().to(self.device, non_blocking=True)
