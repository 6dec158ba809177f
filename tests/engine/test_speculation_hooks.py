"""An engine that the hooks cannot control is refused when its worker starts. No engine is started here."""

from types import SimpleNamespace
from typing import Any

import pytest


def worker(**changes: Any) -> SimpleNamespace:
    """The parts of a worker that are checked, as a good engine has them."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = changes.get("runner") or object.__new__(GPUModelRunner)
    drafter = changes.get("drafter", DraftModelProposer)
    runner.__dict__.update(
        drafter=drafter.__new__(drafter),
        use_async_scheduling=changes.get("asynchronous", False),
        discard_request_mask=None,
        input_batch=None,
        rejection_sampler=None,
    )
    speculative = SimpleNamespace(
        method="draft_model",
        parallel_drafting=False,
        use_heterogeneous_vocab=changes.get("other_vocabulary", False),
        num_speculative_tokens_per_batch_size=None,
        num_speculative_tokens=4,
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=changes.get("pipeline", 1),
        data_parallel_size=changes.get("data", 1),
        decode_context_parallel_size=changes.get("context", 1),
    )
    config = SimpleNamespace(
        speculative_config=speculative,
        parallel_config=parallel,
        model_config=SimpleNamespace(has_inner_state=False),
    )
    return SimpleNamespace(model_runner=runner, vllm_config=config)


def test_the_installed_engine_is_accepted() -> None:
    from specserve_workers.vllm.adapter import check_engine

    check_engine(worker())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner": SimpleNamespace()}, "is not vLLM's V1 runner; start the engine with VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"asynchronous": True}, "start with --no-async-scheduling"),
        ({"pipeline": 2}, "set --pipeline-parallel-size 1"),
        ({"data": 2}, "use more decode replicas"),
        ({"other_vocabulary": True}, "another vocabulary"),
        ({"drafter": SimpleNamespace}, "use method draft_model"),
        ({"context": 2}, "decode context parallelism"),
    ],
)
def test_an_engine_out_of_control_is_refused_with_what_to_do(changes: dict[str, Any], message: str) -> None:
    from specserve_workers.vllm.adapter import HookError, check_engine

    with pytest.raises(HookError, match=message):
        check_engine(worker(**changes))


def test_a_changed_function_of_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from specserve_workers.vllm import adapter

    changed = ((RejectionSampler.forward, ("self", "metadata", "logits")),)
    monkeypatch.setattr(adapter, "EXPECTED_PARAMETERS", changed)
    with pytest.raises(adapter.HookError, match=r"RejectionSampler.forward of this vLLM takes self, metadata"):
        adapter.check_engine(worker())


def test_replaced_hooks_are_found_before_serving() -> None:
    from specserve_workers.vllm import adapter

    loose = worker()
    hooks = adapter.V1Hooks(loose)
    with pytest.raises(adapter.HookError, match="the drafter was replaced by DraftModelProposer"):
        hooks.verify()


def group(*layers: str) -> SimpleNamespace:
    return SimpleNamespace(layer_names=list(layers))


def runner_with(groups: list[SimpleNamespace], *, draft: list[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(attn_groups=[groups], drafter=SimpleNamespace(draft_attn_groups=draft))


def test_the_targets_forward_gets_no_metadata_for_layers_of_the_draft() -> None:
    from specserve_workers.vllm.adapter import leave_out_draft_attention

    target, draft = group("model.0", "model.1"), group("draft.0")
    runner = runner_with([target, draft], draft=[group("draft.0")])
    leave_out_draft_attention(runner)
    assert runner.attn_groups == [[target]]


def test_a_group_that_target_and_draft_share_stays() -> None:
    from specserve_workers.vllm.adapter import leave_out_draft_attention

    shared = group("model.0", "draft.0")
    runner = runner_with([shared], draft=[group("draft.0")])
    leave_out_draft_attention(runner)
    assert runner.attn_groups == [[shared]]


def test_groups_that_do_not_tell_the_models_apart_are_refused() -> None:
    from specserve_workers.vllm.adapter import HookError, leave_out_draft_attention

    with pytest.raises(HookError, match="cannot be told apart"):
        leave_out_draft_attention(runner_with([group("model.0")], draft=[group("model.0")]))
    with pytest.raises(HookError, match="keeps attention groups elsewhere"):
        leave_out_draft_attention(SimpleNamespace(drafter=SimpleNamespace()))
