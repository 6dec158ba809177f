"""Waiting for conditions."""

import time
from collections.abc import Callable

from hack.kube.errors import WaitTimeoutError

INTERVAL_SECONDS = 0.1


def wait_until(check: Callable[[], bool], timeout_seconds: float, *, what: str, hint: str = "") -> None:
    """Returns as soon as `check()` is true, which it asks ten times a second.

    Raises:
        WaitTimeoutError: with `what` (a clause such as "the API server is ready") and `hint` when the time is up.
    """
    deadline = time.monotonic() + timeout_seconds
    while not check():
        if time.monotonic() > deadline:
            raise WaitTimeoutError(what, timeout_seconds, hint=hint)
        time.sleep(INTERVAL_SECONDS)
