"""How a serving pod starts and how a failed start is told: one clear line, last on stderr and in the pod's status."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from specserve_workers.flags import FlagError, ServingFlags, parse_flags
from specserve_workers.frontend.middleware import Pool

TERMINATION_LOG: Final = "/dev/termination-log"
TERMINATION_LOG_VARIABLE: Final = "SPECSERVE_TERMINATION_LOG"
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_TERMINATED: Final = 128 + 15


class StartupError(Exception):
    """The pod cannot start. The message names what is wrong and with which flag or file."""


def run_pod(pool: Pool, serve: Callable[[ServingFlags], int], *, argv: Sequence[str] | None = None) -> int:
    """Runs a pod to its end and returns its exit code.

    0: it ended as it was told to. 1: it could not start, or its engine died. 2: a flag is wrong. 143: it was told to
    end before it had started.
    """
    try:
        flags = parse_flags(pool, sys.argv[1:] if argv is None else argv)
    except FlagError as error:
        return report_failure(str(error), code=EXIT_USAGE)
    try:
        return serve(flags)
    except StartupError as error:
        return report_failure(str(error))
    except KeyboardInterrupt:
        return EXIT_TERMINATED


def report_failure(message: str, *, code: int = EXIT_FAILED, environ: Mapping[str, str] = os.environ) -> int:
    """Writes the line that says why, and returns `code`."""
    line = "error: " + " ".join(message.split())
    sys.stdout.flush()
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    log = Path(environ.get(TERMINATION_LOG_VARIABLE, TERMINATION_LOG))
    try:
        # The file is made by the kubelet; elsewhere there is none, unless a path was given.
        if TERMINATION_LOG_VARIABLE in environ or log.is_file():
            log.write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"{log} could not be written: {error.strerror}\n{line}\n")
    return code


def port_message(flag: str, host: str, port: int, *, error: OSError) -> str:
    """Why a port cannot be listened on."""
    return f"{flag} {port}: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
