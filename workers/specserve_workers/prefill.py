"""`python -m specserve_workers.prefill`: computes the KV cache of prompts and holds it for decode pods."""

import sys

from specserve_workers.frontend.middleware import Pool
from specserve_workers.startup import run_pod


def main() -> int:
    from specserve_workers.vllm.server import serve

    return run_pod(Pool.PREFILL, serve)


# The engine's processes import this module again: without the guard each would start a pod.
if __name__ == "__main__":
    sys.exit(main())
