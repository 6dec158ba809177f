"""F1-F3: what the gateway, the hooks and `Off` cost, each as a ratio of interleaved rounds.

    python -m bench.serving [--rounds N] [--pairs N] [--only F1,F2,F3]

F1  tokens/s through gateway and decode pod (local prefill) over the same pod called directly          >= 0.95
F2  tokens/s with our hooks, policy Static k, over the stock engine's draft_model with the same k      >= 0.98
F3  tokens/s with our hooks, policy Off, over an engine that was started without any drafter           >= 0.97

F2 and F3 compare engines in processes of their own, offline, that take turns; greedy, so both do the same work, which
is checked. Every pair of processes gives one ratio. F1 sends requests over HTTP to the running service, by turns to the
gateway and to the pod.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.engines import Engine
from bench.pairs import Claim, paired_ratio, write_results
from bench.plots import plot_ratios
from examples.load import Prompt, read_prompts, send_all

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CLI = Path(sys.executable).with_name("specserve")
BARS = {"F1": 0.95, "F2": 0.98, "F3": 0.97}
DRAFT_TOKENS = 4
BATCHES = (1, 8)
MAX_TOKENS = 64
PAIR_ROUNDS = 5
F1_PORT = 8090
STATIC = {"policy": "Static", "cap": "None", "minTokens": 0, "maxTokens": 4, "staticTokens": DRAFT_TOKENS}
OFF = {"policy": "Off", "cap": "None", "minTokens": 0, "maxTokens": 4, "staticTokens": 0}


def engine_config(*, draft: bool) -> dict[str, Any]:
    """Arguments of vllm.LLM for the tiny pair, the same for every engine that is compared."""
    config: dict[str, Any] = {
        "model": str(EXAMPLES / "tiny" / "models" / "target"),
        "dtype": "float32",  # fast on every CPU: where bfloat16 is emulated, arithmetic hides what is compared
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if draft:
        config["speculative_config"] = {
            "method": "draft_model",
            "model": str(EXAMPLES / "tiny" / "models" / "draft"),
            "num_speculative_tokens": DRAFT_TOKENS,
        }
    return config


@dataclass(slots=True)
class Comparison:
    """Tokens per second of two engines that take turns, collected over several pairs of processes."""

    claim_id: str
    names: tuple[str, str]  # ours, theirs
    speeds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # one value a pair
    by_batch: dict[int, dict[str, list[float]]] = field(default_factory=lambda: {b: defaultdict(list) for b in BATCHES})

    def run_pair(self, ours: Engine, theirs: Engine, *, prompts: Sequence[str], rounds: int) -> None:
        """Alternates two engines that have just started, batch by batch; their order alternates, too."""
        tokens, seconds = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for number in range(rounds + 1):  # round 0 warms both up
            for batch in BATCHES:
                chosen = [prompts[(number * 8 + i) % len(prompts)] for i in range(batch)]
                texts = {}
                for engine in (ours, theirs) if number % 2 else (theirs, ours):
                    done = engine.generate(chosen, MAX_TOKENS)
                    texts[engine.name] = done["texts"]
                    if number:
                        tokens[engine.name, batch] += done["tokens"]
                        seconds[engine.name, batch] += done["seconds"]
                if texts[ours.name] != texts[theirs.name]:
                    raise RuntimeError(f"{self.claim_id}: texts differ, so the engines did not do the same work")
        for name in self.names:
            for batch in BATCHES:
                self.by_batch[batch][name].append(tokens[name, batch] / seconds[name, batch])
            total = sum(seconds[name, batch] for batch in BATCHES)
            self.speeds[name].append(sum(tokens[name, batch] for batch in BATCHES) / total)

    def claim(self) -> Claim:
        ours, theirs = self.names
        return paired_ratio(self.claim_id, self.speeds[ours], self.speeds[theirs])

    def data(self) -> dict[str, Any]:
        parts = {b: paired_ratio(self.claim_id, *(s[name] for name in self.names)) for b, s in self.by_batch.items()}
        return {
            "tokens_per_second": {name: self.speeds[name] for name in self.names},
            "by_batch_size": {b: {"ratio": [p.value, p.low, p.high]} | self.by_batch[b] for b, p in parts.items()},
        }


def engine_of(name: str, *, log_dir: Path) -> Engine:
    """The engine process that a comparison calls `name`; it is starting."""
    hooks = name.startswith("hooks")
    config = engine_config(draft=hooks or name == "stock-draft-model")
    return Engine(name, engine=config, hooks=hooks, log_dir=log_dir)


def measure_engines(wanted: set[str], *, pairs: int, rounds: int) -> tuple[list[Claim], dict[str, Any]]:
    """F2 and F3. Two processes of the same engine differ by several percent for as long as they live (where their
    memory lies), so engines are started anew for every value that counts.
    """
    prompts = [p.prompt for p in read_prompts(EXAMPLES / "tiny" / "prompts.jsonl") if p.prompt is not None]
    static = Comparison("F2", ("hooks-static", "stock-draft-model"))
    off = Comparison("F3", ("hooks-off", "stock-no-drafter"))
    comparisons = [(c, settings) for c, settings in ((static, STATIC), (off, OFF)) if c.claim_id in wanted]
    with tempfile.TemporaryDirectory() as logs, suppress(KeyboardInterrupt):  # Ctrl-C: the pairs so far count
        for pair in range(pairs):
            for comparison, settings in comparisons:
                with ExitStack() as stack:
                    names = comparison.names if pair % 2 else comparison.names[::-1]
                    engines = {name: engine_of(name, log_dir=Path(logs)) for name in names}  # they start together
                    for engine in engines.values():
                        stack.enter_context(engine)
                    ours, theirs = (engines[name] for name in comparison.names)
                    ours.set_speculation(settings)
                    comparison.run_pair(ours, theirs, prompts=prompts, rounds=rounds)
                print(f"pair {pair + 1} of {pairs}: {comparison.claim()}", flush=True)
    return [c.claim() for c, _ in comparisons], {c.claim_id: c.data() for c, _ in comparisons}


def tokens_per_second(base_url: str, prompts: Sequence[Prompt]) -> float:
    """Sends `prompts`, 8 at a time; raises RuntimeError if a request fails, since its time would count for nothing."""
    import time

    begin = time.perf_counter()
    outcomes = asyncio.run(send_all(base_url, "bench", prompts=prompts, concurrency=8))
    seconds = time.perf_counter() - begin
    failed = [o.error for o in outcomes if o.error]
    if failed:
        raise RuntimeError(f"{base_url}: {failed[0]}")
    return sum(o.output_tokens for o in outcomes) / seconds


def in_both_orders(speeds: Sequence[float]) -> list[float]:
    """Means of two rounds each, of which one ran ours first and one theirs: what comes first is not as fast."""
    return [(first + second) / 2 for first, second in zip(speeds[::2], speeds[1::2], strict=True)]


def f1_manifest() -> dict[str, Any]:
    """The tiny service, aggregated, with one decode pod: the only difference left is the gateway."""
    manifest: dict[str, Any] = yaml.safe_load((EXAMPLES / "tiny.yaml").read_text(encoding="utf-8"))
    manifest["metadata"]["name"] = "bench"
    spec = manifest["spec"]
    spec.pop("prefill", None)
    spec["decode"]["replicas"] = 1
    spec["gateway"] = {"port": F1_PORT}
    spec["model"]["uri"] = f"file://{EXAMPLES}/tiny/models/target"
    spec["speculation"]["draft"]["uri"] = f"file://{EXAMPLES}/tiny/models/draft"
    return manifest


def measure_gateway(rounds: int) -> tuple[list[Claim], dict[str, Any]]:
    """F1."""
    prompts = read_prompts(EXAMPLES / "tiny" / "prompts.jsonl")[:16]
    with tempfile.TemporaryDirectory() as folder:
        state = ["--state-dir", f"{folder}/state"]
        manifest = Path(folder) / "bench.yaml"
        manifest.write_text(yaml.safe_dump(f1_manifest()), encoding="utf-8")
        subprocess.run([CLI, "up", "-f", manifest, "--wait", *state], check=True)
        try:
            pods = json.loads(subprocess.check_output([CLI, "get", "pods", "--json", *state]))
            (decode,) = [p for p in pods["items"] if "-decode-" in p["metadata"]["name"]]
            direct = f"http://{decode['status']['podIP']}:8000"
            gateway = f"http://127.0.0.1:{F1_PORT}"
            speeds: dict[str, list[float]] = {gateway: [], direct: []}
            for number in range(rounds + 1):
                for url in (gateway, direct) if number % 2 else (direct, gateway):
                    speed = tokens_per_second(url, prompts)
                    if number:
                        speeds[url].append(speed)
        finally:
            subprocess.run([CLI, "down", *state], check=False)
    data = {"tokens_per_second": {"gateway": in_both_orders(speeds[gateway]), "direct": in_both_orders(speeds[direct])}}
    claim = paired_ratio("F1", *data["tokens_per_second"].values())
    return [claim], {"F1": data | {"single_rounds": {"gateway": speeds[gateway], "direct": speeds[direct]}}}


def ratios_of(data: dict[str, Any]) -> list[float]:
    """Ours over theirs, pair by pair."""
    ours, theirs = data["tokens_per_second"].values()
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=48, help="of F1, an even number")
    parser.add_argument("--pairs", type=int, default=20, help="of processes, F2 and F3")
    parser.add_argument("--only", default="F1,F2,F3")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    claims: list[Claim] = []
    data: dict[str, Any] = {}
    steps: list[Callable[[], tuple[list[Claim], dict[str, Any]]]] = []
    if "F1" in wanted:
        steps.append(lambda: measure_gateway(arguments.rounds))
    if wanted & {"F2", "F3"}:
        steps.append(lambda: measure_engines(wanted, pairs=arguments.pairs, rounds=PAIR_ROUNDS))
    for step in steps:
        new_claims, new_data = step()
        claims += new_claims
        data |= new_data
    command = " ".join(["python -m bench.serving", *sys.argv[1:]])
    claims.sort(key=lambda claim: claim.id)
    path = write_results("serving", command, claims=claims, data=data)
    plot_ratios(path.with_suffix(".png"), claims, ratios={c.id: ratios_of(data[c.id]) for c in claims}, bars=BARS)
    for claim in claims:
        bar = BARS[claim.id]
        print(f"{claim.id}  {claim.value:.3f} [{claim.low:.3f}, {claim.high:.3f}]  bar {bar}: {claim.verdict(bar)}")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
