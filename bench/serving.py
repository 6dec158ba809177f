"""F1-F3: what the gateway, the hooks and `Off` cost, each as a ratio of interleaved rounds.

    python -m bench.serving [--rounds N] [--only F1,F2,F3]

F1  tokens/s through gateway and decode pod (local prefill) over the same pod called directly          >= 0.95
F2  tokens/s with our hooks, policy Static k, over the stock engine's draft_model with the same k      >= 0.98
F3  tokens/s with our hooks, policy Off, over an engine that was started without any drafter           >= 0.97

F2 and F3 compare engines in processes of their own, offline, that take turns; greedy, so both do the same work, which
is checked. F1 sends requests over HTTP to the running service, by turns to the gateway and to the pod.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from bench.engines import Engine
from bench.pairs import Claim, paired_ratio, write_results
from examples.load import Prompt, read_prompts, send_all

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CLI = Path(sys.executable).with_name("specserve")
BARS = {"F1": 0.95, "F2": 0.98, "F3": 0.97}
DRAFT_TOKENS = 4
BATCHES = (1, 8)
MAX_TOKENS = 96
F1_PORT = 8090
STATIC = {"policy": "Static", "cap": "None", "minTokens": 0, "maxTokens": 4, "staticTokens": DRAFT_TOKENS}
OFF = {"policy": "Off", "cap": "None", "minTokens": 0, "maxTokens": 4, "staticTokens": 0}


def engine_config(*, draft: bool) -> dict[str, Any]:
    """Arguments of vllm.LLM for the tiny pair, the same for every engine that is compared."""
    config: dict[str, Any] = {
        "model": str(EXAMPLES / "tiny" / "models" / "target"),
        "dtype": "bfloat16",
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


def compare(
    claim_id: str, ours: Engine, theirs: Engine, *, prompts: Sequence[str], rounds: int
) -> tuple[Claim, dict[str, Any]]:
    """Alternates the two engines over all batch sizes; one ratio a round, from the summed times of its batches.

    The order within a round alternates too, so that neither always runs on the warmer machine.
    """
    speeds: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    by_batch: dict[str, dict[int, list[float]]] = {e.name: {b: [] for b in BATCHES} for e in (ours, theirs)}
    different = 0
    for number in range(rounds + 1):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        texts: dict[str, list[str]] = {}
        for engine in order:
            tokens, seconds, out = 0, 0.0, []
            for batch in BATCHES:
                start = number * 8 % len(prompts)
                chosen = [prompts[(start + i) % len(prompts)] for i in range(batch)]
                done = engine.generate(chosen, MAX_TOKENS)
                tokens += done["tokens"]
                seconds += done["seconds"]
                out += done["texts"]
                if number:
                    by_batch[engine.name][batch].append(done["tokens"] / done["seconds"])
            texts[engine.name] = out
            if number:  # round 0 warms both up
                speeds[engine.name].append(tokens / seconds)
        different += sum(a != b for a, b in zip(texts[ours.name], texts[theirs.name], strict=True))
    claim = paired_ratio(claim_id, speeds[ours.name], speeds[theirs.name])
    data = {"tokens_per_second": speeds, "by_batch": by_batch, "texts_that_differ": different}
    for batch in BATCHES:
        part = paired_ratio(f"{claim_id}/batch{batch}", by_batch[ours.name][batch], by_batch[theirs.name][batch])
        data[part.id] = [part.value, part.low, part.high]
    return claim, data


def measure_engines(wanted: set[str], rounds: int) -> tuple[list[Claim], dict[str, Any]]:
    """F2 and F3."""
    prompts = [p.prompt for p in read_prompts(EXAMPLES / "tiny" / "prompts.jsonl") if p.prompt is not None]
    claims, data = [], {}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:

        def start(name: str, *, draft: bool, hooks: bool) -> Engine:
            return stack.enter_context(Engine(name, engine=engine_config(draft=draft), hooks=hooks, log_dir=Path(logs)))

        ours = start("hooks", draft=True, hooks=True)
        if "F2" in wanted:
            ours.set_speculation(STATIC)
            stock = start("stock-draft-model", draft=True, hooks=False)
            claim, data["F2"] = compare("F2", ours, stock, prompts=prompts, rounds=rounds)
            claims.append(claim)
        if "F3" in wanted:
            ours.set_speculation(OFF)
            plain = start("stock-no-drafter", draft=False, hooks=False)
            claim, data["F3"] = compare("F3", ours, plain, prompts=prompts, rounds=rounds)
            claims.append(claim)
    return claims, data


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
    claim = paired_ratio("F1", speeds[gateway], speeds[direct])
    return [claim], {"F1": {"tokens_per_second": {"gateway": speeds[gateway], "direct": speeds[direct]}}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--only", default="F1,F2,F3")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    claims: list[Claim] = []
    data: dict[str, Any] = {}
    steps: list[Callable[[], tuple[list[Claim], dict[str, Any]]]] = []
    if "F1" in wanted:
        steps.append(lambda: measure_gateway(arguments.rounds))
    if wanted & {"F2", "F3"}:
        steps.append(lambda: measure_engines(wanted, arguments.rounds))
    for step in steps:
        new_claims, new_data = step()
        claims += new_claims
        data |= new_data
    command = " ".join(["python -m bench.serving", *sys.argv[1:]])
    path = write_results("serving", command, claims=sorted(claims, key=lambda c: c.id), data=data)
    for claim in claims:
        bar = BARS[claim.id]
        print(f"{claim.id}  {claim.value:.3f} [{claim.low:.3f}, {claim.high:.3f}]  bar {bar}: {claim.verdict(bar)}")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
