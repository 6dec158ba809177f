"""Runs all tests: the fast ones in one process, each engine module in a process of its own, a service end to end.

    python hack/test.py [--jobs N] [GROUP ...]          # groups: fast engine cluster e2e kube

An engine cannot be started twice in one process, and two of them fit on two cores, so engine modules run N at
a time. Their output is printed when they end. The exit code is 0 only if every process passed and ran a test.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("fast", "engine", "cluster", "e2e", "kube")
FAST = ("tests/unit", "tests/contract", "tests/component", "tests/chart")


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    exit_code: int
    passed: int
    failed: int
    skipped: int
    seconds: float


def count(output: str, word: str) -> int:
    """How many tests `word` (passed, failed, error, skipped) there were, from pytest's closing line."""
    closing = output.strip().splitlines()[-1:] or [""]
    found = re.search(rf"(\d+) {word}", closing[0])
    return int(found.group(1)) if found else 0


def run_pytest(name: str, paths: Sequence[str], *, show_live: bool) -> Result:
    """Runs pytest on `paths`; its output goes to the terminal at once, or as a whole when it ends."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if show_live:
            print(line, end="", flush=True)
    exit_code = process.wait()
    output = "".join(lines)
    if not show_live:
        print(f"--- {name}\n{output}", end="", flush=True)
    return Result(
        name=name,
        exit_code=exit_code,
        passed=count(output, "passed"),
        failed=count(output, "failed") + count(output, "error"),
        skipped=count(output, "skipped"),
        seconds=time.monotonic() - begin,
    )


def engine_modules() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "engine").glob("test_*.py"))


def run_groups(groups: Sequence[str], jobs: int) -> list[Result]:
    results = []
    if "fast" in groups:
        results.append(run_pytest("fast", FAST, show_live=True))
    if "engine" in groups:
        with ThreadPoolExecutor(jobs) as pool:
            runs = [pool.submit(run_pytest, module, [module], show_live=False) for module in engine_modules()]
            results += [run.result() for run in runs]
    for group, folder in (("cluster", "tests/cluster"), ("e2e", "tests/e2e"), ("kube", "tests/kube")):
        if group in groups:
            results.append(run_pytest(group, [folder], show_live=True))
    return results


def print_summary(results: Sequence[Result]) -> None:
    width = max(len(result.name) for result in results)
    print()
    for result in results:
        verdict = "ok" if result.exit_code == 0 else f"exit code {result.exit_code}"
        print(f"{result.name:{width}}  {result.passed:5} passed  {result.seconds:6.0f} s  {verdict}")
    passed, failed, skipped = (sum(getattr(r, f) for r in results) for f in ("passed", "failed", "skipped"))
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="engine modules at a time")
    arguments = parser.parse_args()
    if unknown := set(arguments.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    results = run_groups(arguments.groups or GROUPS, arguments.jobs)
    print_summary(results)
    return 0 if all(result.exit_code == 0 and result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
