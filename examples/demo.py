"""`make demo`: serves a model on this machine, sends prompts through the gateway and says what happened.

    python -m examples.demo [--model tiny|qwen] [--concurrency N]

Starts the service of examples/<model>.yaml with `specserve up --wait`, sends the prompts of
examples/<model>/prompts.jsonl through the OpenAI API, prints a table and `specserve describe`, and stops.
Exits with 0 only if every request succeeded and KV cache really moved from prefill to decode.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.load import Outcome, Prompt, read_prompts, send_all

EXAMPLES = Path(__file__).parent
CLI = Path(sys.executable).with_name("specserve")
# The operator reads the pods' counters every few seconds; the table waits for the last request in them.
STATUS_TIMEOUT_SECONDS = 30.0


# Of x86: bfloat16 products in hardware. Arm has them in every processor that runs such a model.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


@dataclass(frozen=True, slots=True)
class Example:
    manifest: Path
    prompts: Path
    service: str
    model: str
    start_timeout_seconds: int
    memory_gb: int
    # For processors that emulate the models' number format: all that can be done in minutes.
    slow_requests: int | None = None
    slow_tokens: int = 32

    def read_prompts(self, *, slow: bool = False) -> list[Prompt]:
        prompts = read_prompts(self.prompts)
        if not slow:
            return prompts
        return [replace(prompt, max_tokens=self.slow_tokens) for prompt in prompts[: self.slow_requests]]


EXAMPLE_OF_MODEL = {
    "tiny": Example(
        EXAMPLES / "tiny.yaml",
        EXAMPLES / "tiny" / "prompts.jsonl",
        service="tiny",
        model="tiny",
        start_timeout_seconds=600,
        memory_gb=5,
    ),
    "qwen": Example(
        EXAMPLES / "qwen.yaml",
        EXAMPLES / "qwen" / "prompts.jsonl",
        service="coder",
        model="qwen2.5-coder",
        start_timeout_seconds=1200,
        memory_gb=13,
        slow_requests=6,
    ),
}


class DemoError(Exception):
    """A step failed, and why."""


class Service:
    """The running example, by way of the same commands that a user would type."""

    def __init__(self, example: Example, state_dir: Path) -> None:
        self.example = example
        self.state_dir = state_dir

    def run(self, *words: str, capture: bool = False) -> str:
        """Runs one `specserve` command.

        Raises:
            DemoError: it exited with another code than 0.
        """
        command = [str(CLI), *words, "--state-dir", str(self.state_dir)]
        done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True, check=False)
        if done.returncode != 0:
            raise DemoError(f"`specserve {' '.join(words)}` exited with {done.returncode}")
        return done.stdout or ""

    def start(self) -> None:
        timeout = str(self.example.start_timeout_seconds)
        self.run("up", "-f", str(self.example.manifest), "--wait", "--timeout", timeout)

    def status(self) -> dict[str, Any]:
        """The `status` of the service, as `specserve get --json` gives it."""
        output = self.run("get", "spsvc", self.example.service, "--json", capture=True)
        status: dict[str, Any] = json.loads(output)["status"]
        return status

    def status_after(self, requests: int) -> dict[str, Any]:
        """The status once it accounts for `requests`, or the last one seen when that takes too long."""
        deadline = time.monotonic() + STATUS_TIMEOUT_SECONDS
        while True:
            status = self.status()
            transfer = status.get("kvTransfer", {})
            counted = transfer.get("transfers", 0) + transfer.get("fallbacks", 0)
            if counted >= requests or time.monotonic() > deadline:
                return status
            time.sleep(1)

    def describe(self) -> None:
        self.run("describe", self.example.service)

    def stop(self) -> None:
        self.run("down")


def has_bfloat16_instructions(cpuinfo: str) -> bool:
    """Whether products of bfloat16 numbers are fast on the processor that `cpuinfo` (/proc/cpuinfo) describes."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() == "flags":
            return not BFLOAT16_FLAGS.isdisjoint(flags.split())
    return True


def check_memory(needed_gb: int) -> None:
    """Raises DemoError where models would not fit: a machine that swaps or evicts stands still instead of failing."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            available_gb = int(amount.split()[0]) / 1e6
            if available_gb < needed_gb:
                raise DemoError(f"about {needed_gb} GB of free memory are needed, {available_gb:.1f} GB are free")


def send_with_progress(endpoint: str, model: str, *, prompts: Sequence[Prompt], concurrency: int) -> list[Outcome]:
    """Sends all prompts behind a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        task = progress.add_task(f"{len(prompts)} requests, {concurrency} at a time", total=len(prompts))
        return asyncio.run(
            send_all(
                endpoint,
                model,
                prompts=prompts,
                concurrency=concurrency,
                on_done=lambda outcome: progress.advance(task),
            )
        )


def percentile_text(values: Sequence[float], unit: str = "ms") -> str:
    """p50 and p90 of `values` for a table cell."""
    if len(values) < 2:
        return "-"
    tenths = quantiles(values, n=10, method="inclusive")
    return f"{tenths[4]:.0f} / {tenths[8]:.0f} {unit}"


def summary_table(outcomes: Sequence[Outcome], status: dict[str, Any], *, seconds: float) -> Table:
    """What the client saw, beside what the service says of itself."""
    ttft = [o.time_to_first_token_ms for o in outcomes if o.time_to_first_token_ms is not None]
    tpot = [o.time_per_output_token_ms for o in outcomes if o.time_per_output_token_ms is not None]
    speculation = status.get("speculation", {})
    transfer = status.get("kvTransfer", {})
    tokens = sum(o.output_tokens for o in outcomes)
    acceptance = speculation.get("acceptancePercent")
    table = Table(title="What happened", title_justify="left", show_header=False)
    table.add_row("requests", str(len(outcomes)))
    table.add_row("failures", str(sum(o.error is not None for o in outcomes)))
    table.add_row("output tokens", f"{tokens} ({tokens / seconds:.0f} per second)")
    table.add_row("TTFT p50 / p90", percentile_text(ttft))
    table.add_row("TPOT p50 / p90", percentile_text(tpot))
    table.add_row("draft tokens accepted", "-" if acceptance is None else f"{acceptance} %")
    table.add_row("mean accepted length", str(speculation.get("meanAcceptedLength", "-")))
    table.add_row("prompts prefilled remotely", str(transfer.get("transfers", 0)))
    table.add_row("KV moved", f"{transfer.get('bytes', 0) / 1e6:.1f} MB, {transfer.get('tokens', 0)} tokens")
    table.add_row("fallbacks to local prefill", str(transfer.get("fallbacks", 0)))
    return table


def verdict(outcomes: Sequence[Outcome], status: dict[str, Any]) -> str | None:
    """What is wrong with the run; None if nothing is."""
    errors = [o.error for o in outcomes if o.error is not None]
    if errors:
        return f"{len(errors)} of {len(outcomes)} requests failed, the first with: {errors[0]}"
    if not status.get("kvTransfer", {}).get("bytes"):
        return "no KV cache moved from prefill to decode"
    return None


def run_demo(example: Example, *, state_dir: Path, concurrency: int, slow: bool = False) -> int:
    """The whole demo; returns the exit code."""
    console = Console()
    service = Service(example, state_dir)
    try:
        check_memory(example.memory_gb)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    problem: str | None = None
    try:
        service.start()
        endpoint = service.status()["endpoint"]
        prompts = example.read_prompts(slow=slow)
        begin = time.perf_counter()
        outcomes = send_with_progress(endpoint, example.model, prompts=prompts, concurrency=concurrency)
        seconds = time.perf_counter() - begin
        status = service.status_after(len(prompts))
        console.print(summary_table(outcomes, status, seconds=seconds))
        service.describe()
        problem = verdict(outcomes, status)
    except DemoError as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    finally:
        try:
            service.stop()
        except DemoError as error:
            problem = problem or str(error)
    if problem is not None:
        print(f"demo: {problem}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(EXAMPLE_OF_MODEL), default="tiny")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--state-dir", type=Path, default=EXAMPLES.parent / ".specserve" / "demo")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: nothing is left running
    example = EXAMPLE_OF_MODEL[arguments.model]
    if arguments.model == "qwen":
        from examples.qwen.fetch_models import FetchError, fetch_pair

        try:
            fetch_pair(EXAMPLES / "qwen" / "models")
        except FetchError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
    slow = example.slow_requests is not None and not has_bfloat16_instructions(Path("/proc/cpuinfo").read_text())
    if slow:
        print(
            "This processor has no bfloat16 instructions, so prompts are read some ten times slower: "
            f"{example.slow_requests} requests of {example.slow_tokens} tokens, one at a time, about seven minutes."
        )
    concurrency = 1 if slow else arguments.concurrency
    return run_demo(example, state_dir=arguments.state_dir, concurrency=concurrency, slow=slow)


if __name__ == "__main__":
    sys.exit(main())
