"""Waiting for what other threads do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
