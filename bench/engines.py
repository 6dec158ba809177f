"""Starts engine processes (bench.engine_process) and talks to them; only one computes at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.engine_process import MARK

ROOT = Path(__file__).resolve().parent.parent


class EngineEndedError(Exception):
    """The engine process ended; the message has the end of its log."""


class Engine:
    """One engine process, as a context manager. `name` also names its log file in `log_dir`."""

    def __init__(self, name: str, *, engine: dict[str, Any], hooks: bool, log_dir: Path) -> None:
        self.name = name
        self.log = (log_dir / f"{name}.log").open("w+", encoding="utf-8")
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # One process and one thread per engine: what is compared is the engine, not its message queues.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.engine_process", json.dumps({"engine": engine, "hooks": hooks})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
        )

    def __enter__(self) -> Self:
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line[len(MARK) :])
                return answer
        self.log.seek(0)
        raise EngineEndedError(f"{self.name} ended: {self.log.read()[-2000:]}")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends one request line and waits for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def generate(self, prompts: list[str], max_tokens: int) -> dict[str, Any]:
        """Runs one greedy batch: {"seconds", "tokens", "texts", "token_ids"}."""
        return self.ask({"prompts": prompts, "max_tokens": max_tokens})

    def set_speculation(self, settings: dict[str, Any]) -> None:
        self.ask({"speculation": settings})
