"""What is read from a client, and what the router gets of it."""

from http import HTTPStatus

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specserve_workers.gateway.heads import RequestHead
from specserve_workers.gateway.reader import MAX_HEAD_BYTES, RequestReader
from specserve_workers.gateway.refusals import Refusal
from specserve_workers.gateway.routes import find_refusal


class Upstream:
    """Takes what passes."""

    def __init__(self) -> None:
        self.sent = b""
        self.ended = 0

    def take_head(self, head: RequestHead) -> Refusal | None:
        refusal = find_refusal(head.method, head.target)
        if refusal is None:
            self.sent += head.rendered
        return refusal

    def take_part(self, data: bytes) -> None:
        self.sent += data

    def take_end(self) -> None:
        self.ended += 1


def read(*parts: bytes) -> tuple[Upstream, HTTPStatus | None]:
    """What the router gets, and the status of the first refusal."""
    upstream, status = Upstream(), None
    reader = RequestReader(upstream)
    for part in parts:
        refusal = reader.feed(part)
        if refusal is not None:
            assert status is None
            status = refusal.status
    return upstream, status


def request(line: str = "POST /v1/completions HTTP/1.1", *headers: str, body: bytes = b"") -> bytes:
    head = "".join(f"{text}\r\n" for text in (line, "Host: a", *headers))
    return head.encode("latin-1") + b"\r\n" + body


def understood(sent: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """The whole requests in what the router gets, as a third parser reads it: method, target and body of each."""
    found = []
    server = h11.Connection(h11.SERVER)
    server.receive_data(sent)
    head, body = None, b""
    while (event := server.next_event()) is not h11.NEED_DATA and not isinstance(event, h11.ConnectionClosed):
        if event is h11.PAUSED:
            if server.their_state is h11.MUST_CLOSE:
                break
            server.start_next_cycle()
        elif isinstance(event, h11.Request):
            head, body = event, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            found.append((head.method, head.target, body))
            server.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            server.send(h11.EndOfMessage())
            if server.our_state is h11.MUST_CLOSE:
                break
    return found


def test_a_request_is_rebuilt_with_one_framing_and_without_what_is_for_the_next_hop() -> None:
    upstream, status = read(
        request(
            "POST /v1/completions?x=1 HTTP/1.1",
            "Content-Type: application/json",
            "Content-Length: 0002",
            "Authorization: Bearer key",
            "X-Empty:",
            "X-Mine: 1",
            "Connection: keep-alive, X-Mine, Host",
            "Keep-Alive: timeout=5",
            "TE: trailers",
            "Proxy-Authorization: Basic x",
            "Expect: 100-continue",
            body=b"{}",
        )
    )
    assert status is None
    assert upstream.sent == (
        b"POST /v1/completions?x=1 HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer key\r\nx-empty: \r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert upstream.ended == 1


def test_headers_that_choose_a_worker_are_left_out() -> None:
    names = ("X-Data-Parallel-Rank", "x-worker-priority", "X-Prefer-PD", "x-max-cost", "X-Router-Stages")
    upstream, _ = read(request("GET /v1/models HTTP/1.1", *(f"{name}: 1" for name in names), "x-request-id: r"))
    assert upstream.sent == b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-request-id: r\r\n\r\n"


def test_a_body_in_chunks_is_framed_anew() -> None:
    body = b"3;ext=1\r\n{ab\r\n0002\r\nc}\r\n0\r\nX-Trailer: 1\r\nHost: b\r\n\r\n"
    upstream, status = read(request("POST /v1/completions HTTP/1.1", "Transfer-Encoding: Chunked", body=body))
    assert status is None
    assert upstream.sent == (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\n{ab\r\n2\r\nc}\r\n0\r\n\r\n"
    )


def test_requests_follow_each_other_until_one_is_the_last() -> None:
    first, second = request(body=b""), request("POST /v1/embeddings HTTP/1.1", "Content-Length: 3", body=b"abc")
    last, late = request("GET /v1/models HTTP/1.1", "Connection: close"), request("GET /v1/late HTTP/1.1")
    upstream, status = read(first + second + last + late, late)
    assert status is None
    assert understood(upstream.sent) == [
        (b"POST", b"/v1/completions", b""),
        (b"POST", b"/v1/embeddings", b"abc"),
        (b"GET", b"/v1/models", b""),
    ]
    assert upstream.sent.endswith(b"host: a\r\nconnection: close\r\n\r\n")


@pytest.mark.parametrize("line", ["GET /v1/models HTTP/1.0", "HEAD /health HTTP/1.1"])
def test_nothing_follows_a_request_whose_answer_is_framed_otherwise(line: str) -> None:
    upstream, status = read(request(line) + request("GET /v1/late HTTP/1.1"))
    assert (status, upstream.ended) == (None, 1)
    assert upstream.sent == line.encode() + b"\r\nhost: a\r\nconnection: close\r\n\r\n"


def test_an_offer_of_http_2_is_overlooked_and_its_body_is_read() -> None:
    offer = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAA")
    later = request("GET /v1/models HTTP/1.1")
    with_body = request("POST /v1/completions HTTP/1.1", "Content-Length: 4", *offer, body=b"abcd")
    in_chunks = request(
        "POST /v1/completions HTTP/1.1", "Transfer-Encoding: chunked", *offer, body=b"2\r\nab\r\n0\r\n\r\n"
    )
    without = request("GET /v1/models HTTP/1.1", *offer)
    for first, body in ((with_body, b"abcd"), (in_chunks, b"ab"), (without, b"")):
        for at in range(1, len(first)):
            upstream, status = read(first[:at], first[at:] + later)
            assert status is None
            assert [found[2] for found in understood(upstream.sent)] == [body, b""]
            assert b"pgrade" not in upstream.sent


def test_any_number_of_offers_may_come_at_once() -> None:
    offer = request("GET /v1/models HTTP/1.1", "Upgrade: h2c", "Connection: Upgrade")
    upstream, status = read(offer * 3000)
    assert (status, upstream.ended) == (None, 3000)


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        # More than one framing, or none that is certain.
        ("POST /v1/a HTTP/1.1", ("Content-Length: 1", "Content-Length: 1"), 400),
        ("POST /v1/a HTTP/1.1", ("Content-Length: 1", "Transfer-Encoding: chunked"), 400),
        ("POST /v1/a HTTP/1.1", ("Transfer-Encoding: chunked", "Content-Length: 1"), 400),
        ("POST /v1/a HTTP/1.1", ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
        ("POST /v1/a HTTP/1.1", ("Transfer-Encoding: gzip, chunked",), 400),
        ("POST /v1/a HTTP/1.1", ("Transfer-Encoding: identity",), 400),
        ("POST /v1/a HTTP/1.1", ("Transfer-Encoding: chunked, identity",), 400),
        ("POST /v1/a HTTP/1.1", ("Transfer-Encoding: xchunked",), 400),
        ("POST /v1/a HTTP/1.1", ("Transfer-Encoding : chunked",), 400),
        ("POST /v1/a HTTP/1.1", ("Transfer-Encoding:\x0bchunked",), 400),
        ("POST /v1/a HTTP/1.0", ("Transfer-Encoding: chunked",), 400),
        ("POST /v1/a HTTP/1.1", ("Content-Length: +1",), 400),
        ("POST /v1/a HTTP/1.1", ("Content-Length: -1",), 400),
        ("POST /v1/a HTTP/1.1", ("Content-Length: 1, 1",), 400),
        ("POST /v1/a HTTP/1.1", ("Content-Length: 0x1",), 400),
        ("POST /v1/a HTTP/1.1", ("Content-Length: 1 1",), 400),
        ("POST /v1/a HTTP/1.1", ("Content-Length:",), 400),
        ("POST /v1/a HTTP/1.1", ("Content-Length: 99999999999999999999",), 400),
        # Headers that another parser may read otherwise.
        ("POST /v1/a HTTP/1.1", ("X: a\r\n b: c",), 400),
        ("POST /v1/a HTTP/1.1", (" X: a",), 400),
        ("POST /v1/a HTTP/1.1", ("X: a\rb: c",), 400),
        ("POST /v1/a HTTP/1.1", ("X: a\nb: c",), 400),
        ("POST /v1/a HTTP/1.1", ("X: a\x00b",), 400),
        ("POST /v1/a HTTP/1.1", ("X: a\x01b",), 400),
        ("POST /v1/a HTTP/1.1", ("X: a\x7fb",), 400),
        ("POST /v1/a HTTP/1.1", ("X a",), 400),
        ("POST /v1/a HTTP/1.1", (": a",), 400),
        ("POST /v1/a HTTP/1.1", ("Host: b",), 400),
        # First lines.
        ("GET http://a/v1/models HTTP/1.1", (), 404),
        ("OPTIONS * HTTP/1.1", (), 404),
        ("GET /v1/mo dels HTTP/1.1", (), 400),
        ("GET /v1/models HTTP/1.2", (), 400),
        ("GET /v1/models HTTP/0.9", (), 505),
        ("GET /v1/models HTTP/2.0", (), 505),
        ("GET /v1/models", (), 505),
        ("get /v1/models HTTP/1.1", (), 400),
        ("BREW /v1/models HTTP/1.1", (), 400),
        ("CONNECT 10.0.0.1:80 HTTP/1.1", (), 404),
        ("PRI * HTTP/2.0", (), 400),
        # Protocols that are not spoken.
        ("GET /v1/realtime HTTP/1.1", ("Upgrade: websocket", "Connection: upgrade"), 501),
        ("GET /v1/a HTTP/1.1", ("Upgrade: h2c, websocket", "Connection: upgrade"), 501),
        ("GET /add_worker HTTP/1.1", ("Upgrade: h2c", "Connection: upgrade"), 404),
        # Sizes.
        ("GET /v1/a HTTP/1.1", tuple(f"x-{number}: 1" for number in range(100)), 431),
        ("GET /v1/a HTTP/1.1", ("X: " + "a" * MAX_HEAD_BYTES,), 431),
        ("GET /v1/a?" + "a" * MAX_HEAD_BYTES + " HTTP/1.1", (), 431),
    ],
)
def test_a_head_that_is_ambiguous_or_too_much_does_not_pass(line: str, headers: tuple[str, ...], status: int) -> None:
    raw = request(line, *headers, body=b"a")
    for parts in ([raw], [raw[at : at + 1] for at in range(len(raw))] if len(raw) < 4096 else [raw[:9], raw[9:]]):
        upstream, refused = read(*parts)
        assert (refused, upstream.sent) == (HTTPStatus(status), b"")


def test_more_space_in_the_first_line_is_not_passed_on() -> None:
    upstream, status = read(request("GET   /v1/models   HTTP/1.1"))
    assert (status, upstream.sent) == (None, b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")


def test_http_1_1_needs_a_host() -> None:
    upstream, status = read(b"GET /v1/models HTTP/1.1\r\n\r\n")
    assert (status, upstream.sent) == (HTTPStatus.BAD_REQUEST, b"")


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"3\r\nabcd\r\n",
        b"1\na\r\n",
        b"1\r\na0\r\n",
        b"-1\r\na",
        b"0x1\r\na\r\n",
        b"0\r\nbad\r\n",
        b"0\r\nContent-Length: 5\r\n",
    ],
)
def test_a_body_in_wrong_chunks_does_not_end(body: bytes) -> None:
    upstream, status = read(request("POST /v1/a HTTP/1.1", "Transfer-Encoding: chunked", body=body + b"\r\n"))
    assert (status, upstream.ended) == (HTTPStatus.BAD_REQUEST, 0)
    assert understood(upstream.sent) == []


@pytest.mark.parametrize(
    ("before", "more"),
    [
        (b"GET /v1/a", b"a" * 4096),
        (b"GET /v1/a HTTP/1.1\r\nx", b"x" * 4096),
        (b"GET /v1/a HTTP/1.1\r\nx:", b"x" * 4096),
        (b"GET /v1/a HTTP/1.1\r\n", b"x: 1\r\n" * 512),
    ],
)
def test_a_head_without_end_is_cut_off(before: bytes, more: bytes) -> None:
    upstream = Upstream()
    reader = RequestReader(upstream)
    refusals = [reader.feed(part) for part in (before, *[more] * 30)]
    assert [r.status for r in refusals if r is not None] == [HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE]
    assert refusals.index(None, 1) == 1
    assert upstream.sent == b""


@pytest.mark.parametrize("more", [b"1;" + b"x" * 4096, b"0\r\n" + b"x: " + b"y" * 4096, b"0\r\n" + b"x: y\r\n" * 999])
def test_extensions_and_trailers_without_end_are_cut_off(more: bytes) -> None:
    reader = RequestReader(Upstream())
    assert reader.feed(request("POST /v1/a HTTP/1.1", "Transfer-Encoding: chunked", body=more)) is None
    tail = more[-4096:] if b"\r" not in more[-9:] else b"x: y\r\n" * 999
    refusals = [reader.feed(tail) for _ in range(20)]
    assert [r.status for r in refusals if r is not None] == [HTTPStatus.BAD_REQUEST]


def test_a_long_body_with_a_request_behind_it_is_no_long_head() -> None:
    body = b"a" * (4 * MAX_HEAD_BYTES)
    first = request("POST /v1/a HTTP/1.1", f"Content-Length: {len(body)}", body=body)
    second = request("GET /v1/models HTTP/1.1")
    upstream, status = read(first + second[:20], second[20:])
    assert status is None
    assert [len(found[2]) for found in understood(upstream.sent)] == [len(body), 0]


ALLOWED = [
    request(body=b""),
    request("POST /v1/completions HTTP/1.1", "Content-Length: 31", body=b"GET /add_worker HTTP/1.1\r\n\r\nabc"),
    request(
        "POST /v1/a HTTP/1.1", "Transfer-Encoding: chunked", body=b"5\r\nGET /\r\n3;a=b\r\nabc\r\n0\r\nT: 1\r\n\r\n"
    ),
    request("GET /v1/models HTTP/1.1", "Upgrade: h2c", "Connection: upgrade"),
    request("GET /health HTTP/1.1"),
]
TOKENS = [
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b"\0", b";", b"0", b"1f", b"chunked", b"\r\n\r\n", b"%2e", b"..", b"/"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"GET /add_worker HTTP/1.1\r\nHost: a\r\n\r\n"),
    *(b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"HTTP/1.0", b"Content-Length: 0\r\n", b"\x0b", b"\xff"),
]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Requests in a row, in which a few pieces are replaced, inserted or left out."""
    data = b"".join(draw(st.lists(st.sampled_from(ALLOWED), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 3))
        data = data[:at] + draw(st.sampled_from([b"", *TOKENS])) + data[at + length :]
    return data


@settings(max_examples=400, deadline=None)
@given(streams(), st.lists(st.integers(1, 60), max_size=12))
@example(b"".join(ALLOWED), [1] * 12)
def test_whatever_comes_the_router_reads_just_the_requests_that_were_allowed(data: bytes, sizes: list[int]) -> None:
    """A third parser finds, in what passes, the very requests that passed, each with a path that may."""
    whole, status = read(data)
    found = understood(whole.sent)
    assert len(found) == whole.ended
    for method, target, _ in found:
        assert find_refusal(method, target) is None
    parts, at = [], 0
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    split, split_status = read(*parts, data[at:])
    assert understood(split.sent) == found
    assert split_status == status
