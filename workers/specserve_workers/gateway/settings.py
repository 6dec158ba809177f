"""Limits of the guard."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """`max_connections`: of clients; above it only probes are passed on, for `spare_connections` more.

    `head_seconds`: for the whole head of a request. `stall_seconds`: for more of a body whose client has stopped
    sending. `idle_seconds`: between two requests. `linger_seconds`: for a client to hear the last answer while it still
    sends. `flush_seconds`: at the end of the process, for the last bytes.
    """

    max_connections: int = 8192
    spare_connections: int = 64
    head_seconds: float = 20.0
    stall_seconds: float = 120.0
    idle_seconds: float = 600.0
    linger_seconds: float = 2.0
    flush_seconds: float = 5.0
