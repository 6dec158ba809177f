"""Engines for the tests of this folder: vLLM in this process, float32, on random models that take a second to build.

The models need no tokenizer: prompts are token ids. The draft is the target with noise on its weights, so that it is
right often but not always.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VOCABULARY = 512
MAX_DRAFT_TOKENS = 8
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# The engine's own: none of them is about our code.
ENGINE_WARNINGS = (
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore::UserWarning:vllm.*",
    "ignore::UserWarning:torch.*",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here starts or uses an engine."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            for warning in ENGINE_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


def prompt_of(seed: int, tokens: int) -> list[int]:
    """A prompt of random token ids; the same seed gives the same prompt."""
    return np.random.default_rng(seed).integers(1, VOCABULARY, tokens).tolist()


@dataclass(slots=True)
class Engine:
    """One vLLM engine with our worker class."""

    llm: Any
    generation: int = 0
    _requests: int = 0
    outputs: dict[str, Any] = field(default_factory=dict)

    def call(self, method: str, *args: Any) -> Any:
        """A method of the first rank's worker."""
        return self.llm.collective_rpc(method, args=args)[0]

    def set(self, policy: str, *, tokens: int = 0, cap: str = "None", least: int = 0, most: int = 8) -> None:
        """Puts a policy in force."""
        self.generation += 1
        state = {
            "policy": policy,
            "cap": cap,
            "minTokens": least,
            "maxTokens": most,
            "staticTokens": tokens,
        }
        assert self.call("set_speculation", state, self.generation)["applied"]

    def stats(self) -> dict[str, Any]:
        return self.call("speculation_stats")

    def submit(self, prompt: Sequence[int], *, max_tokens: int, name: str | None = None, **params: Any) -> str:
        """Adds a request; `step` advances it. Returns its name."""
        from vllm import SamplingParams

        self._requests += 1
        name = name or f"request-{self._requests}"
        sampling = SamplingParams(
            **{"temperature": 0.0, **params}, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name

    def step(self) -> None:
        """One engine step; finished requests go to `outputs`."""
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.outputs[output.request_id] = list(output.outputs[0].token_ids)

    def run(self) -> None:
        """Steps until nothing is left."""
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, **params: Any) -> list[list[int]]:
        """All prompts as one batch; the tokens of each."""
        names = [self.submit(prompt, max_tokens=max_tokens, **params) for prompt in prompts]
        self.run()
        return [self.outputs.pop(name) for name in names]

    def generate_alone(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[int]]:
        """Each prompt by itself."""
        return [self.generate([prompt], max_tokens=max_tokens)[0] for prompt in prompts]

    @property
    def worker(self) -> Any:
        """The worker object, for engines in this process."""
        return self.llm.llm_engine.model_executor.driver_worker.worker


@dataclass(frozen=True, slots=True)
class Models:
    target: Path
    draft: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A random target and a noisy copy of it as the draft."""
    root = tmp_path_factory.mktemp("models")
    _save_model(root / "target", noise=0.0)
    _save_model(root / "draft", noise=0.05)
    return Models(root / "target", root / "draft")


def _save_model(folder: Path, *, noise: float) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(7)
    noise_generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                continue
            # Large enough that the text wanders and depends on far tokens, and that the best token leads clearly.
            scale = 1.0 if "embed" in name else (2.0 if "lm_head" in name else 1.5) / weight.shape[1] ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            weight.add_(torch.randn(weight.shape, generator=noise_generator) * scale * noise)
    model.save_pretrained(folder)


def start_engine(models: Models, *, draft: Path | None, **options: Any) -> Engine:
    """Starts an engine. `draft` None: without a drafter. `options` go to `vllm.LLM`."""
    from specserve_workers.vllm.launch import WORKER_CLASSES, speculative_config

    if draft is not None:
        options["speculative_config"] = speculative_config(
            "DraftModel",
            str(draft),
            max_draft_tokens=MAX_DRAFT_TOKENS,
            tensor_parallel_size=options.get("tensor_parallel_size", 1),
        )
    from vllm import LLM

    defaults: dict[str, Any] = {
        "worker_cls": WORKER_CLASSES["cpu"],
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "skip_tokenizer_init": True,
        "seed": 0,
        "disable_log_stats": True,
    }
    return Engine(LLM(str(models.target), **{**defaults, **options}))


@pytest.fixture(scope="module")
def engine_environment() -> Iterator[None]:
    """Environment of an engine in this process; restored afterwards, since other tests start servers."""
    from specserve_workers.vllm.launch import Platform, prepare_environment

    environment = dict(ENVIRONMENT)
    prepare_environment(Platform.CPU, environ=environment)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


def stop_engine(engine: Engine) -> None:
    """Frees an engine of this process, so that another can start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm.llm_engine.engine_core.shutdown()
    engine.llm = None
    cleanup_dist_env_and_memory()
    os.environ.pop("VLLM_DIST_IDENT", None)


@dataclass(frozen=True, slots=True)
class PlainReference:
    """Greedy text of an engine without a drafter."""

    prompts: list[list[int]]
    texts: list[list[int]]


@pytest.fixture(scope="module")
def plain(models: Models, engine_environment: None) -> PlainReference:
    """24 prompts of 5-200 tokens with 48 greedy tokens each, from an engine without a drafter."""
    prompts = [prompt_of(seed, 5 + 195 * seed // 23) for seed in range(24)]
    engine = start_engine(models, draft=None)
    texts = engine.generate_alone(prompts, max_tokens=48)
    stop_engine(engine)
    return PlainReference(prompts, texts)
