import asyncio
import socket
from pathlib import Path

import pytest

from specserve_workers.control.resolver import (
    KEEP_SECONDS,
    STALE_SECONDS,
    PeerAddressError,
    PeerResolver,
    ResolverUnavailableError,
    dns_lookup,
    hosts_dir_lookup,
    parse_peer_address,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Names:
    """Answers look-ups from a variable, and counts them."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | None = addresses
        self.asked = 0

    async def __call__(self, host: str) -> tuple[str, ...]:
        self.asked += 1
        if self.addresses is None:
            raise ResolverUnavailableError("no answer")
        return self.addresses


async def settled(resolver: PeerResolver) -> tuple[str, ...]:
    """The answer once the refresh that the question started is done."""
    await resolver.addresses()
    for _ in range(5):
        await asyncio.sleep(0)
    return await resolver.addresses()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("coder-prefill:8000", ("coder-prefill", 8000)), ("[fd00::1]:80", ("fd00::1", 80))],
)
def test_peer_addresses(text: str, expected: tuple[str, int]):
    assert parse_peer_address(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x"])
def test_anything_but_host_and_port_is_refused(text: str):
    with pytest.raises(PeerAddressError, match="HOST:PORT"):
        parse_peer_address(text)


async def test_the_first_question_waits_for_the_answer():
    assert await PeerResolver("p:80", lookup=Names("10.0.0.1", "fd00::2")).addresses() == (
        "10.0.0.1:80",
        "[fd00::2]:80",
    )


async def test_names_are_looked_up_at_most_once_a_second():
    clock, names = Clock(), Names("10.0.0.1")
    resolver = PeerResolver("p:80", lookup=names, clock=clock)
    for _ in range(5):
        await settled(resolver)
    assert names.asked == 1
    clock.now += 1.0
    names.addresses = ("10.0.0.2",)
    assert await settled(resolver) == ("10.0.0.2:80",)
    assert names.asked == 2


async def test_after_a_pause_the_first_question_gets_the_new_list():
    clock, names = Clock(), Names("10.0.0.1")
    resolver = PeerResolver("p:80", lookup=names, clock=clock)
    await settled(resolver)
    clock.now += STALE_SECONDS
    names.addresses = ("10.0.0.2",)
    assert await resolver.addresses() == ("10.0.0.2:80",)


async def test_peers_that_come_back_are_found_by_the_first_question():
    clock, names = Clock(), Names()
    resolver = PeerResolver("p:80", lookup=names, clock=clock)
    assert await settled(resolver) == ()
    clock.now += 1.0
    names.addresses = ("10.0.0.1",)
    assert await resolver.addresses() == ("10.0.0.1:80",)


async def test_the_last_good_list_stays_while_the_resolver_fails_and_not_for_ever():
    clock, names = Clock(), Names("10.0.0.1")
    resolver = PeerResolver("p:80", lookup=names, clock=clock)
    await settled(resolver)
    names.addresses = None
    clock.now += KEEP_SECONDS
    assert await settled(resolver) == ("10.0.0.1:80",)
    clock.now += 1.0
    assert await settled(resolver) == ()


async def test_a_name_without_addresses_empties_the_list_at_once():
    clock, names = Clock(), Names("10.0.0.1")
    resolver = PeerResolver("p:80", lookup=names, clock=clock)
    await settled(resolver)
    names.addresses = ()
    clock.now += 1.0
    assert await settled(resolver) == ()


async def test_a_hosts_file_lists_one_address_a_line(tmp_path: Path):
    lookup = hosts_dir_lookup(tmp_path)
    assert await lookup("p") == ()
    (tmp_path / "p").write_text("")
    assert await lookup("p") == ()
    (tmp_path / "p").write_text("127.0.0.3\n127.0.0.2\n\n127.0.0.2\n")
    assert await lookup("p") == ("127.0.0.2", "127.0.0.3")


@pytest.mark.parametrize(("errno", "empty"), [(socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)])
async def test_an_unknown_name_is_empty_and_a_failing_resolver_is_not(
    monkeypatch: pytest.MonkeyPatch, errno: int, empty: bool
):
    async def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(errno, "made up")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    if empty:
        assert await dns_lookup("p") == ()
    else:
        with pytest.raises(ResolverUnavailableError):
            await dns_lookup("p")
