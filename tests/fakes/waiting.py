"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], *, timeout_seconds: float = 15.0) -> T:
    """The first true value of `condition`; AssertionError if there is none in time."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {value!r}"
        time.sleep(0.02)
    return value
