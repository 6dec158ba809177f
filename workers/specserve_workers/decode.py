"""`python -m specserve_workers.decode`: generates tokens, with prompts prefilled elsewhere where there are peers."""

import sys

from specserve_workers.frontend.middleware import Pool
from specserve_workers.startup import run_pod


def main() -> int:
    from specserve_workers.vllm.server import serve

    return run_pod(Pool.DECODE, serve)


# The engine's processes import this module again: without the guard each would start a pod.
if __name__ == "__main__":
    sys.exit(main())
