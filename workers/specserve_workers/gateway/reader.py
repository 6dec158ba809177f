"""Reads what a client sends: heads and bodies of one request after another, by the library's parser."""

from http import HTTPStatus
from typing import Final, Protocol

import httptools

from specserve_workers.frontend.errors import Header
from specserve_workers.gateway.heads import MAX_HEADERS, HeadError, RequestHead, rebuild_head
from specserve_workers.gateway.refusals import Refusal, malformed

MAX_HEAD_BYTES: Final = 64 << 10

_TOO_LARGE: Final = Refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"The head of the request has more than {MAX_HEAD_BYTES} bytes."
)
_NO_UPGRADE: Final = Refusal(HTTPStatus.NOT_IMPLEMENTED, "Connections are not upgraded here.")
_BAD_BODY: Final = malformed("The request body is not valid HTTP/1.1.")


class RequestSink(Protocol):
    """What becomes of what was read."""

    def take_head(self, head: RequestHead) -> Refusal | None:
        """A request has begun. It goes no further where there is a refusal."""
        ...

    def take_part(self, data: bytes) -> None:
        """More of its body, framed as its head has said."""
        ...

    def take_end(self) -> None: ...


class RequestReader:
    """Reads the requests of one connection. After the first refusal, or the last request, it reads no more.

    A body is passed on only as long as the rebuilt head says: should the parser ever see another end of a request than
    the router will, nothing of the rest is passed on.
    """

    def __init__(self, sink: RequestSink) -> None:
        self._sink = sink
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: list[Header] = []
        self._size_bytes = 0  # of the head, as far as it is parsed
        self._waste_bytes = 0  # read since something could last be passed on
        self._head: RequestHead | None = None
        self._left_bytes = 0  # of a body of known length
        self._refusal: Refusal | None = None
        self._offer: bytes | None = None
        self._is_replaying = False
        self.is_within_head = False
        self.is_done = False

    @property
    def is_within_body(self) -> bool:
        """Whether a request has been passed on of which more must come."""
        return self._head is not None

    def feed(self, data: bytes) -> Refusal | None:
        """Reads on; what is wrong with it, if anything. That is told once."""
        if self.is_done:
            return None
        self._waste_bytes += len(data)
        try:
            self._parse(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # After a refusal or the last request it may stumble as it likes.
            self._refuse(malformed("The request is not valid HTTP/1.1."))
        if self._waste_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE if self.is_within_head else _BAD_BODY)
        refusal, self._refusal = self._refusal, None
        return refusal

    def stop(self) -> None:
        """Reads no more."""
        self.is_done = True

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                if self._offer is None:
                    raise
                # The parser stops at an offer that is overlooked. Another goes on in its place, behind the same head.
                self._parser = httptools.HttpRequestParser(self)
                self._is_replaying = True
                self._parser.feed_data(self._offer)
                self._is_replaying, self._offer = False, None
                rest = rest[upgrade.args[0] :]
            else:
                return

    def _refuse(self, refusal: Refusal) -> None:
        if not self.is_done:
            self.is_done, self._refusal = True, refusal

    @property
    def _is_deaf(self) -> bool:
        return self.is_done or self._is_replaying

    # What follows is called by the parser.

    def on_message_begin(self) -> None:
        if not self._is_deaf:
            self._target, self._headers, self._size_bytes = b"", [], 0
            self.is_within_head = True

    def on_url(self, part: bytes) -> None:
        if not self._is_deaf:
            self._target += part
            self._size_bytes += len(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Behind a chunked body as well, where they are left out.
        if self.is_within_head and not self._is_replaying:
            self._size_bytes += len(name) + len(value) + 4
            if len(self._headers) <= MAX_HEADERS:
                self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        self.is_within_head, self._waste_bytes = False, 0
        if self._size_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)
            return
        version = self._parser.get_http_version()
        try:
            head = rebuild_head(self._parser.get_method(), self._target, version=version, headers=self._headers)
        except HeadError as error:
            self._refuse(error.refusal)
            return
        refusal = self._sink.take_head(head) if self._may_go_on(head) else _NO_UPGRADE
        if refusal is not None:
            self._refuse(refusal)
            return
        self._head, self._left_bytes = head, head.body_bytes or 0

    def _may_go_on(self, head: RequestHead) -> bool:
        """A server may overlook an offer to speak HTTP/2, which some clients make with every first request."""
        if not self._parser.should_upgrade() or head.method == b"CONNECT":
            return True
        offers = [value.lower() for name, value in self._headers if name.lower() == b"upgrade"]
        if offers == [b"h2c"]:
            self._offer = head.rendered
        return self._offer is not None

    def on_body(self, data: bytes) -> None:
        head = self._head
        if self._is_deaf or head is None:
            return
        self._waste_bytes = 0
        if head.body_bytes is None:
            self._sink.take_part(b"%x\r\n%b\r\n" % (len(data), data))
        elif len(data) <= self._left_bytes:
            self._left_bytes -= len(data)
            self._sink.take_part(data)
        else:
            self._refuse(_BAD_BODY)

    def on_message_complete(self) -> None:
        head = self._head
        if self.is_done or head is None or (self._offer is not None and not self._is_replaying):
            return
        if self._left_bytes:
            self._refuse(_BAD_BODY)
            return
        self._head, self._waste_bytes = None, 0
        if head.body_bytes is None:
            self._sink.take_part(b"0\r\n\r\n")
        self._sink.take_end()
        self.is_done = head.is_last
