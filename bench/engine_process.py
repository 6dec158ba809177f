"""An engine in a process of its own that runs one measured batch for every line on its standard input.

    python -m bench.engine_process CONFIG_JSON

CONFIG_JSON: {"engine": {arguments of vllm.LLM}, "hooks": true|false}. Every input line is a JSON object:
    {"speculation": {settings}}                      changes the policy (needs hooks)
    {"prompts": [...], "max_tokens": n}              greedy, answers {"seconds", "tokens", "texts"}
    {"stats": true}                                  answers the worker's speculation counters (needs hooks)
    {"waits": true, "prompts": ..., "max_tokens": n} answers how often the host waited for the GPU in that batch
The answer is one line that begins with `=> `; everything else on standard output is the engine's own log.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "=> "
# Calls of the CUDA runtime in which the host waits for the device.
WAITING_CALLS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


def engine_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM: the given ones, with our worker class where hooks are wanted."""
    from specserve_workers.vllm import launch

    arguments: dict[str, Any] = dict(config["engine"])
    platform = launch.detect_platform()
    if platform is launch.Platform.CPU or config["hooks"]:
        # On CPUs with and without hooks, so that only the hooks differ.
        launch.prepare_environment(platform)
    if config["hooks"]:
        arguments["worker_cls"] = launch.WORKER_CLASSES[platform]
        if platform is launch.Platform.CUDA:
            arguments["async_scheduling"] = False
    return arguments


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Carries out one request line."""
    from vllm import SamplingParams

    if "speculation" in request:
        generation = time.time_ns()
        return {"set": llm.collective_rpc("set_speculation", args=(request["speculation"], generation))[0]}
    if "stats" in request:
        return {"stats": llm.collective_rpc("speculation_stats")[0]}
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
    if "waits" in request:
        return {"waits": count_waits(lambda: llm.generate(request["prompts"], sampling, use_tqdm=False))}
    begin = time.perf_counter()
    outputs = llm.generate(request["prompts"], sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "texts": [output.outputs[0].text for output in outputs],
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
    }


def count_waits(run: Callable[[], Any]) -> dict[str, int]:
    """Runs `run` under the profiler: how often each waiting call of the CUDA runtime was made."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
    counts = {event.key: event.count for event in recorded.key_averages()}
    return {call: counts.get(call, 0) for call in WAITING_CALLS}


def main() -> int:
    config = json.loads(sys.argv[1])
    arguments = engine_arguments(config)
    from vllm import LLM

    llm = LLM(**arguments)
    print(MARK + json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(answer(llm, json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
