"""`python -m specserve_workers.gateway`: the gateway's port, with the router behind it."""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Final

from specserve_workers.gateway.flags import GatewayFlagError, parse_flags
from specserve_workers.gateway.server import GatewayError, serve

_EXIT_USAGE: Final = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the gateway to its end and returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s [%(name)s] %(message)s")
    try:
        flags = parse_flags(sys.argv[1:] if argv is None else argv)
    except GatewayFlagError as error:
        return _fail(str(error), code=_EXIT_USAGE)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(flags))
    except GatewayError as error:
        return _fail(str(error), code=error.code)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The faster event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _fail(message: str, *, code: int) -> int:
    """Writes why, as the last line: that is what the pod's status shows."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
