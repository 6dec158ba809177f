"""Command line of the gateway: our flags, then `--`, then the router's."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from specserve_workers.gateway.settings import GuardSettings

# Where the router listens is decided here.
_OWNED_ROUTER_FLAGS: Final = ("--host", "--port")


class GatewayFlagError(ValueError):
    """A flag that cannot be used. The message starts with its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFlags:
    host: str
    http_port: int
    settings: GuardSettings
    router_flags: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise GatewayFlagError(message)


def parse_flags(argv: Sequence[str]) -> GatewayFlags:
    """Raises GatewayFlagError for a flag that is missing, unknown or out of its range."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    own, router_flags = words[:at], words[at + 1 :]
    parser = _Parser(prog="specserve_workers.gateway", allow_abbrev=False, usage="%(prog)s FLAGS [-- ROUTER FLAGS]")
    parser.add_argument("--host", required=True, metavar="IP", help="address to listen on, the pod's own")
    parser.add_argument("--http-port", type=_port, default=8000)
    parser.add_argument("--max-connections", type=_count, default=GuardSettings.max_connections)
    values = parser.parse_args(own)
    for flag in router_flags:
        if flag.partition("=")[0] in _OWNED_ROUTER_FLAGS:
            raise GatewayFlagError(f"{flag}: the router listens on loopback, on a port that is chosen at start")
    return GatewayFlags(
        host=values.host,
        http_port=values.http_port,
        settings=GuardSettings(max_connections=values.max_connections),
        router_flags=tuple(router_flags),
    )


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1-65535)")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is not in 1-999999")
    return int(text)
