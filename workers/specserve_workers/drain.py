"""`python -m specserve_workers.drain`: the stop hook of a serving pod. Has the pod drain and waits until that is over.

The serving process listens on a socket in a folder of the pod (control/drain_socket.py): no port of the network drains
a pod. Standard library only, so that it starts at once.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

DIRECTORY_VARIABLE: Final = "SPECSERVE_RUN_DIR"
DEFAULT_DIRECTORY: Final = "/tmp/specserve"
SOCKET_NAME: Final = "drain.sock"


def socket_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the socket of this pod is."""
    return Path(environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY) / SOCKET_NAME


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Another name of `path`: the address of a socket has room for 107 bytes. Raises OSError without its folder."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def main() -> int:
    """0: drained, or the time is up, as the line on standard output says; also where nothing serves yet or any more.

    1: the pod ended before it was drained.
    """
    path = socket_path()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            with short_name(path) as name:
                connection.connect(name)
            with connection.makefile("rb") as answer:
                line = answer.readline()
    except (FileNotFoundError, ConnectionRefusedError):
        sys.stdout.write("nothing serves in this pod: there is nothing to drain\n")
        return 0
    except OSError as error:
        sys.stderr.write(f"error: {path}: {error.strerror}\n")
        return 1
    sys.stdout.write(line.decode() or "the pod ended before it was drained\n")
    return 0 if line else 1


if __name__ == "__main__":
    sys.exit(main())
