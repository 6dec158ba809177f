"""The guard on real connections: what passes, in which order, and how each side learns that the other is gone."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from tests.component.gateway.rig import ANSWER, HELLO, REFUSED, GuardRig, guard_rig

MUCH = 64 << 20
PART = b"x" * (1 << 20)


@pytest.fixture
async def rig() -> AsyncIterator[GuardRig]:
    async with guard_rig() as running:
        yield running


async def test_an_answer_comes_as_it_is_and_part_by_part(rig: GuardRig) -> None:
    body = b'{"stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    client, router = await rig.pair(head + body)
    answer = b"HTTP/1.1 200 OK\r\nX-Odd:  a \r\nTransfer-Encoding: chunked\r\n\r\n"
    for part in (answer, b"5;x\r\ntoken\r\n", b"3\r\nend\r\n", b"0\r\nT: 1\r\n\r\n"):
        router.send(part)
        await client.expect(part)
    client.send(HELLO)
    await router.expect(HELLO)
    router.send(ANSWER)
    await client.expect(ANSWER)
    assert rig.routers.empty()


async def test_a_request_that_is_refused_does_not_come_to_the_router(rig: GuardRig) -> None:
    client = await rig.client(REFUSED + HELLO)
    status, headers, error = await client.refusal()
    assert (status, headers["content-type"]) == (404, "application/json")
    assert error == {
        "message": "This path is not served here.",
        "type": "NotFoundError",
        "param": None,
        "code": 404,
    }
    assert rig.routers.empty()


async def test_a_refusal_waits_for_the_answers_to_earlier_requests(rig: GuardRig) -> None:
    client, router = await rig.pair()
    client.send(HELLO + REFUSED + HELLO)
    await router.expect(HELLO)
    router.send(b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER[:-1])
    await client.expect(b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER[:-1])
    router.send(ANSWER[-1:] + ANSWER)
    await client.expect(ANSWER[-1:] + ANSWER)
    assert (await client.refusal())[0] == 404
    assert await router.rest() == b""


async def test_a_refusal_reaches_a_client_that_still_sends(rig: GuardRig) -> None:
    client = await rig.client(b"POST /add_worker HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % MUCH)
    for _ in range(8):
        client.send(PART)
        await client.writer.drain()
    assert (await client.refusal())[0] == 404


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_client_that_goes_takes_its_request_with_it(rig: GuardRig, is_reset: bool) -> None:
    client, router = await rig.pair()
    router.send(ANSWER[:-1])
    await client.expect(ANSWER[:-1])
    if is_reset:
        linger = struct.pack("ii", 1, 0)
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    client.close()
    assert await router.rest() == b""


async def test_what_the_router_has_said_before_it_closed_is_flushed(rig: GuardRig) -> None:
    client, router = await rig.pair()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (2 * len(PART))
    router.send(head + PART)
    router.close()
    assert await client.rest() == head + PART


async def test_a_request_that_the_router_drops_is_answered(rig: GuardRig) -> None:
    client, router = await rig.pair()
    router.send(ANSWER)
    await client.expect(ANSWER)
    client.send(HELLO)
    await router.expect(HELLO)
    router.close()
    status, headers, error = await client.refusal()
    assert (status, headers["retry-after"], error["type"]) == (503, "1", "ServiceUnavailableError")


async def test_a_router_that_does_not_listen_is_unavailable(rig: GuardRig) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        rig.gateway.router_port = unused.getsockname()[1]
        status, headers, error = await (await rig.client(HELLO)).refusal()
    assert (status, headers["retry-after"], error["code"]) == (503, "1", 503)


async def test_a_client_that_does_not_read_stops_the_router_and_no_byte_is_lost(rig: GuardRig) -> None:
    client, router = await rig.pair()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % MUCH
    router.send(head)
    sent = await send_until_stuck(router.writer, MUCH)
    assert sent < MUCH
    sending = asyncio.create_task(send_all(router.writer, MUCH - sent))
    await client.expect(head)
    assert await count(client.reader, MUCH) == MUCH
    await sending


async def test_a_router_that_does_not_read_stops_the_client_and_no_byte_is_lost(rig: GuardRig) -> None:
    head = b"POST /v1/a HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % MUCH
    client = await rig.client(head)
    router = await rig.router()
    sent = await send_until_stuck(client.writer, MUCH)
    assert sent < MUCH
    sending = asyncio.create_task(send_all(client.writer, MUCH - sent))
    await router.expect(head)
    assert await count(router.reader, MUCH) == MUCH
    await sending
    router.send(ANSWER)
    await client.expect(ANSWER)


async def send_until_stuck(writer: asyncio.StreamWriter, most: int) -> int:
    """How much is taken by a way at whose end nobody reads."""
    sent = 0
    while sent < most:
        writer.write(PART)
        sent += len(PART)
        try:
            await asyncio.wait_for(writer.drain(), 0.5)
        except TimeoutError:
            break
    return sent


async def send_all(writer: asyncio.StreamWriter, size: int) -> None:
    for _ in range(size // len(PART)):
        writer.write(PART)
        await writer.drain()


async def count(reader: asyncio.StreamReader, size: int) -> int:
    found = 0
    while found < size and (data := await asyncio.wait_for(reader.read(1 << 20), 10)):
        assert data.count(b"x") == len(data)
        found += len(data)
    return found


async def test_an_answer_that_comes_before_the_whole_request_passes(rig: GuardRig) -> None:
    head = b"POST /v1/a HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % MUCH
    client = await rig.client(head + b"x")
    router = await rig.router()
    await router.expect(head + b"x")
    too_large = b"HTTP/1.1 413 Payload Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    router.send(too_large)
    router.close()
    assert await client.rest() == too_large


async def test_a_body_that_goes_wrong_is_refused_and_the_router_gets_no_end_of_it(rig: GuardRig) -> None:
    head = b"POST /v1/a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    client, router = await rig.pair(head + b"1\r\na\r\n")
    client.send(b"zz\r\n")
    assert (await client.refusal())[0] == 400
    assert await router.rest() == b""


async def test_a_body_that_goes_wrong_within_its_answer_breaks_both_off(rig: GuardRig) -> None:
    head = b"POST /v1/a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    client, router = await rig.pair(head + b"1\r\na\r\n")
    router.send(ANSWER[:-1])
    await client.expect(ANSWER[:-1])
    client.send(b"zz\r\n")
    assert await client.rest() == b""
    assert await router.rest() == b""


async def test_the_answer_to_head_has_no_body_and_nothing_follows(rig: GuardRig) -> None:
    client = await rig.client(b"HEAD /health HTTP/1.1\r\nhost: a\r\n\r\n" + HELLO)
    router = await rig.router()
    await router.expect(b"HEAD /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    router.send(ANSWER[:-2])
    router.close()
    assert await client.rest() == ANSWER[:-2]
    assert await router.rest() == b""


async def test_an_answer_that_nobody_has_asked_for_is_not_taken_for_the_next(rig: GuardRig) -> None:
    client, router = await rig.pair()
    router.send(ANSWER + ANSWER)
    assert await client.rest() == ANSWER + ANSWER
    assert await router.rest() == b""


async def test_an_answer_without_a_known_end_passes_and_no_request_follows_it(rig: GuardRig) -> None:
    client, router = await rig.pair()
    router.send(b"HTTP/1.1 200 OK\r\nbad header\r\n\r\nabc")
    await client.expect(b"HTTP/1.1 200 OK\r\nbad header\r\n\r\nabc")
    router.send(b"def")
    await client.expect(b"def")
    client.send(HELLO)
    assert await client.rest() == b""
    assert await router.rest() == b""


async def test_a_head_that_does_not_come_in_time_is_refused() -> None:
    async with guard_rig(head_seconds=0.2) as rig:
        client = await rig.client(HELLO[:-1])
        silent = await rig.client()
        status, _, error = await client.refusal()
        assert (status, error["type"]) == (408, "BadRequestError")
        assert await silent.rest() == b""
        assert rig.routers.empty()


async def test_a_body_that_does_not_come_in_time_is_refused_and_its_request_ends() -> None:
    async with guard_rig(head_seconds=0.2, stall_seconds=0.2) as rig:
        client, router = await rig.pair(b"POST /v1/a HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nx")
        assert (await client.refusal())[0] == 408
        assert await router.rest() == b""


async def test_a_connection_is_closed_when_it_is_idle_but_not_while_it_waits_for_an_answer() -> None:
    async with guard_rig(head_seconds=0.2, stall_seconds=0.2, idle_seconds=0.2) as rig:
        client, router = await rig.pair()
        idle, its_router = await rig.pair()
        its_router.send(ANSWER)
        assert await idle.rest() == ANSWER
        assert await its_router.rest() == b""
        router.send(ANSWER)
        await client.expect(ANSWER)


async def test_above_the_limit_of_connections_only_probes_pass() -> None:
    async with guard_rig(max_connections=1, spare_connections=1) as rig:
        first, router = await rig.pair()
        probe = await rig.client(b"GET /liveness HTTP/1.1\r\nhost: a\r\n\r\n")
        its_router = await rig.router()
        await its_router.read_head()
        status, headers, _ = await (await rig.client()).refusal()
        assert (status, headers["retry-after"]) == (503, "1")
        its_router.send(ANSWER)
        await probe.expect(ANSWER)
        probe.send(HELLO)
        assert (await probe.refusal())[0] == 503
        router.send(ANSWER)
        await first.expect(ANSWER)
        first.close()
        await router.rest()
        probe.close()
        await its_router.rest()
        third, router = await rig.pair()
        router.send(ANSWER)
        await third.expect(ANSWER)


async def test_at_the_end_running_requests_are_answered_and_idle_connections_closed(rig: GuardRig) -> None:
    running, router = await rig.pair()
    idle, its_router = await rig.pair()
    its_router.send(ANSWER)
    await idle.expect(ANSWER)
    rig.gateway.stop_listening()
    assert await idle.rest() == b""
    router.send(ANSWER)
    await running.expect(ANSWER)
    with pytest.raises(ConnectionRefusedError):
        await (await rig.client(HELLO)).reader.readexactly(1)
