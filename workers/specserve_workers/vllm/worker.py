"""Worker classes for `--worker-cls`: vLLM's own, with the speculation hooks installed at start.

Also used for engines without a drafter, so that `set_speculation` and `speculation_stats` always answer. See `launch`
for what they take and return; both are reached by `collective_rpc` and run between two engine steps.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from specserve_workers.vllm.adapter import V1Hooks


class SpeculationMixin:
    """Over any worker of vLLM that drives a V1 model runner. Methods without a docstring extend the engine's."""

    hooks: V1Hooks

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        self.hooks = V1Hooks(self)
        self.hooks.install()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self.hooks.use_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.hooks.verify()
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        self.hooks.before_forward(scheduler_output)
        result = super().execute_model(scheduler_output)  # type: ignore[misc]
        self.hooks.after_forward(scheduler_output)
        return result

    def take_draft_token_ids(self) -> Any:
        return self.hooks.cut(super().take_draft_token_ids())  # type: ignore[misc]

    def set_speculation(self, settings: dict[str, Any], generation: int) -> dict[str, Any]:
        """Puts settings in force from the next step on. Raises SettingsError."""
        return self.hooks.set_speculation(settings, generation)

    def speculation_stats(self) -> dict[str, Any]:
        """Counters since start and the settings in force."""
        return self.hooks.controller.stats()

    def kv_stats(self) -> dict[str, Any]:
        """This rank's numbers of KV transfer since start; empty without a connector."""
        from specserve_workers.vllm.connector import kv_stats

        return kv_stats()


class SpeculativeCPUWorker(SpeculationMixin, CPUWorker):
    """Worker of the CPU build."""


class SpeculativeGPUWorker(SpeculationMixin, Worker):
    """Worker of the CUDA build."""
