"""Interleaved comparison: the ratio of two things measured in turn, its interval, and the results file."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of a results file: a value with its 95 % interval, from so many paired rounds."""

    id: str
    value: float
    low: float
    high: float
    rounds: int

    def verdict(self, bar: float) -> str:
        """Whether the interval lies above `bar`, below it, or across it."""
        if self.low >= bar:
            return "held"
        return "missed" if self.high < bar else "undecided"


def paired_ratio(claim_id: str, ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Claim:
    """Median of the ratios ours/theirs of the same round, with a bootstrap interval of the median.

    Both sequences have one value a round, e.g. tokens per second, taken one right after the other, so that a
    machine whose speed drifts slows both.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{claim_id}: {len(ours)} rounds against {len(theirs)}")
    ratios = np.asarray(ours, dtype=float) / np.asarray(theirs, dtype=float)
    draws = np.random.default_rng(seed).choice(ratios, size=(BOOTSTRAP_SAMPLES, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Claim(claim_id, round(float(np.median(ratios)), 4), round(float(low), 4), round(float(high), 4), len(ratios))


def machine() -> dict[str, Any]:
    """What the numbers were measured on, without a name."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def write_results(name: str, command: str, *, claims: Sequence[Claim], data: dict[str, Any]) -> Path:
    """Writes bench/results/<name>.json; the commit is the one that was measured."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=RESULTS.parent,
    )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "command": command,
        "commit": described.stdout.strip(),
        "machine": machine(),
        "claims": [asdict(claim) for claim in claims],
        "data": data,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
