"""Addresses of the prefill pods behind one service name, refreshed beside the requests that use them."""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
# How long the last good list serves while the resolver itself fails. Peers that are gone cost one refused connection.
KEEP_SECONDS = 300.0
# A list of this age may be from another time: after a pause the first request waits for a new one.
STALE_SECONDS = 5.0

Lookup = Callable[[str], Awaitable[tuple[str, ...]]]


class PeerAddressError(ValueError):
    """`--prefill-peers` is not HOST:PORT."""


class ResolverUnavailableError(OSError):
    """The resolver could not be asked. Not the same as a name without addresses."""


def parse_peer_address(value: str) -> tuple[str, int]:
    """Splits HOST:PORT; an IPv6 address stands in brackets."""
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise PeerAddressError(f"{value!r} is not HOST:PORT with a port of 1-65535")
    return host, int(port)


def hosts_dir_lookup(hosts_dir: Path) -> Lookup:
    """Looks names up in files, one address a line. A missing or empty file means no addresses."""

    async def lookup(host: str) -> tuple[str, ...]:
        try:
            text = (hosts_dir / host).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ()
        except (OSError, UnicodeDecodeError) as error:
            raise ResolverUnavailableError(f"{hosts_dir / host}: {error}") from error
        return tuple(sorted({line.strip() for line in text.splitlines() if line.strip()}))

    return lookup


async def dns_lookup(host: str) -> tuple[str, ...]:
    """All addresses of a name, resolved in a thread of the event loop's executor."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        # A headless Service without ready pods has no record at all.
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return ()
        raise ResolverUnavailableError(f"{host}: {error}") from error
    return tuple(sorted({str(address[4][0]) for address in found}))


class PeerResolver:
    """Keeps the list of `host:port` peers of one service name fresh."""

    def __init__(self, peers: str, *, lookup: Lookup, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._port = parse_peer_address(peers)
        self._lookup = lookup
        self._clock = clock
        self._peers: tuple[str, ...] = ()
        self._asked_at: float | None = None
        self._good_at: float | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def addresses(self) -> tuple[str, ...]:
        """Peers as `host:port`.

        A recent list is answered at once and refreshed behind the caller. Without one, or with an empty one, the
        caller waits for the refresh, at most `REFRESH_SECONDS`: a wrong "none" costs a prefill here.
        """
        now = self._clock()
        if self._refreshing is None and (self._asked_at is None or now - self._asked_at >= REFRESH_SECONDS):
            self._asked_at = now
            self._refreshing = asyncio.create_task(self._refresh())
        is_recent = self._good_at is not None and now - self._good_at < STALE_SECONDS
        if self._refreshing is not None and not (is_recent and self._peers):
            await asyncio.wait({self._refreshing}, timeout=REFRESH_SECONDS)
        return self._peers

    async def aclose(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})

    async def _refresh(self) -> None:
        try:
            found = await self._lookup(self._host)
        except ResolverUnavailableError as error:
            self._forget_when_old(error)
        else:
            peers = tuple(_join(address, self._port) for address in found)
            if peers != self._peers:
                logger.info("prefill peers of %s: %s", self._host, ", ".join(peers) or "none")
            self._peers, self._good_at = peers, self._clock()
        finally:
            self._refreshing = None

    def _forget_when_old(self, error: ResolverUnavailableError) -> None:
        age = None if self._good_at is None else self._clock() - self._good_at
        if age is None or age > KEEP_SECONDS:
            self._peers = ()
        logger.warning("prefill peers could not be resolved (%s); using %d known", error, len(self._peers))


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
