"""The head of a request, rebuilt so that there is one way to read it. Pure.

What the router gets is made of what was parsed: one framing of the body, names in small letters, no header that is for
the next hop only, and none by which a client could choose where its request goes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from specserve_workers.frontend.errors import Header
from specserve_workers.gateway.refusals import Refusal, malformed

MAX_HEADERS: Final = 100

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# By these the router and the engine let a request say which worker or rank it is for, and ask where it has been.
_STEERING: Final = frozenset({b"x-max-cost", b"x-prefer-pd"})
_STEERING_FAMILIES: Final = (b"x-data-parallel-", b"x-router-", b"x-worker-")
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")


class HeadError(Exception):
    """A head that cannot be passed on. `refusal` is the answer to it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class RequestHead:
    """`body_bytes`: how long the body is; None if it comes in chunks. `is_last`: no request may follow this one."""

    method: bytes
    target: bytes
    body_bytes: int | None
    is_last: bool
    rendered: bytes


def rebuild_head(method: bytes, target: bytes, *, version: str, headers: Sequence[Header]) -> RequestHead:
    """Makes a head for the router from a parsed one. `version` is "1.0" or "1.1", anything else is refused.

    Raises:
        HeadError: it is ambiguous, or no server should have to read it.
    """
    _check(version, headers)
    hop: dict[bytes, list[bytes]] = {}
    passing: list[Header] = []
    for given, value in headers:
        name = given.lower()
        if name in _HOP_BY_HOP:
            hop.setdefault(name, []).append(value)
        elif name not in _STEERING and not name.startswith(_STEERING_FAMILIES):
            passing.append((name, value))
    if version == "1.1" and sum(name == b"host" for name, _ in passing) != 1:
        raise HeadError(malformed("The request must have one `host` header."))
    body_bytes = _framing(hop, version=version)
    options = {option.strip().lower() for value in hop.get(b"connection", ()) for option in value.split(b",")}
    if options:
        passing = [(name, value) for name, value in passing if name not in options or name == b"host"]
    # HEAD is the one method whose answer is framed by more than itself. Nothing follows it, so nobody has to know.
    is_last = version == "1.0" or b"close" in options or method == b"HEAD"
    lines = [b"%b %b HTTP/%b\r\n" % (method, target, version.encode())]
    lines += [b"%b: %b\r\n" % header for header in passing]
    if body_bytes is None:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif body_bytes or method == b"POST":
        lines.append(b"content-length: %d\r\n" % body_bytes)
    lines.append(b"connection: close\r\n\r\n" if is_last else b"\r\n")
    return RequestHead(method, target, body_bytes, is_last, b"".join(lines))


def _check(version: str, headers: Sequence[Header]) -> None:
    if version not in ("1.0", "1.1"):
        raise HeadError(Refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 is spoken here."))
    if len(headers) > MAX_HEADERS:
        message = f"The request has more than {MAX_HEADERS} headers."
        raise HeadError(Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message))
    if _VALUE.fullmatch(b"".join([value for _, value in headers])) is None:
        raise HeadError(malformed("A header has characters that no header may have."))


def _framing(hop: Mapping[bytes, Sequence[bytes]], *, version: str) -> int | None:
    lengths, encodings = hop.get(b"content-length", ()), hop.get(b"transfer-encoding", ())
    if encodings:
        if [value.lower() for value in encodings] != [b"chunked"] or lengths or version == "1.0":
            raise HeadError(malformed("The length of the request body can be read in more than one way."))
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        raise HeadError(malformed("`content-length` must be one number."))
    return int(lengths[0])
