"""One client's connection, and the one to the router that belongs to it.

Requests go to the router as they are read, answers come back as they are. Answers are watched by a parser that copies
nothing, for where each ends: so a refusal is given in its turn, behind the answers to earlier requests, and it is known
which connections are idle.
"""

import asyncio
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol, cast

import httptools

from specserve_workers.gateway.heads import RequestHead
from specserve_workers.gateway.reader import RequestReader
from specserve_workers.gateway.refusals import Refusal, unavailable
from specserve_workers.gateway.routes import find_refusal, is_probe
from specserve_workers.gateway.settings import GuardSettings

_FULL: Final = unavailable("This gateway has too many connections.")
_UNREACHABLE: Final = unavailable("The router of this gateway does not answer.")
_TOO_SLOW: Final = Refusal(HTTPStatus.REQUEST_TIMEOUT, "The request did not come in time.")
_NEVER: Final = math.inf


class Guard(Protocol):
    """What all connections share."""

    settings: GuardSettings
    router_port: int

    def add(self, connection: "ClientConnection") -> int:
        """How many there are with this one."""
        ...

    def remove(self, connection: "ClientConnection") -> None: ...


class ClientConnection(asyncio.Protocol):
    """From the client's first byte to the last one for it."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._settings = guard.settings
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(self)
        self._answers = AnswerWatch(self._on_answered)
        self._transport: asyncio.Transport | None = None
        self._upstream: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._outgoing: list[bytes] = []
        self._owed = 0  # requests that the router has not answered
        self._refusal: Refusal | None = None
        self._is_spare = False
        self._is_ending = False  # nothing comes after what is written already
        self._is_held = False  # the router does not read on
        self._deadline = _NEVER
        self._unsent_bytes = 0  # when the deadline was last put off for it

    # The client's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        settings, count = self._settings, self._guard.add(self)
        self._is_spare = count > settings.max_connections
        self._deadline = self._loop.time() + settings.head_seconds
        if count > settings.max_connections + settings.spare_connections:
            transport.write(_FULL.render())
            transport.close()
            self._is_ending = True

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        if self._answers.is_lost:
            # An answer whose end is not known: no request can be put behind it.
            self.abort()
            return
        was_within_head = self._reader.is_within_head
        refusal = self._reader.feed(data)
        self._send()
        if refusal is not None:
            self._refuse(refusal)
        self._put_off(was_within_head=was_within_head)

    def eof_received(self) -> bool:
        if self._is_ending and self._transport is not None and self._transport.get_write_buffer_size():
            return True  # it may still read its last answer
        # The client is gone, and what runs for it is to end now. One that shuts down its half only is not told apart.
        self.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._is_ending = True
        self._drop_upstream()
        self._guard.remove(self)

    def pause_writing(self) -> None:
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.resume_reading()

    # What the reader has found.

    def take_head(self, head: RequestHead) -> Refusal | None:
        refusal = find_refusal(head.method, head.target)
        if refusal is None and self._is_spare and not is_probe(head.target):
            refusal = _FULL
        if refusal is None:
            self._owed += 1
            self._outgoing.append(head.rendered)
        return refusal

    def take_part(self, data: bytes) -> None:
        self._outgoing.append(data)

    def take_end(self) -> None:
        """Nothing to do: the router knows it from the framing."""

    # The router's side.

    def _send(self) -> None:
        if not self._outgoing:
            return
        if self._upstream is not None:
            data = self._outgoing[0] if len(self._outgoing) == 1 else b"".join(self._outgoing)
            self._outgoing.clear()
            self._upstream.write(data)
        elif self._connecting is None:
            self.hold()
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            await self._loop.create_connection(lambda: _RouterConnection(self), "127.0.0.1", self._guard.router_port)
        except OSError:
            self._answer_now(_UNREACHABLE)

    def router_connected(self, transport: asyncio.Transport) -> None:
        if self._is_ending:
            transport.abort()
            return
        self._upstream = transport
        self.release()
        self._send()

    def router_answered(self, data: bytes) -> None:
        if self._transport is not None and not self._is_ending:
            self._transport.write(data)
            self._answers.feed(data)

    def router_lost(self) -> None:
        """The router has closed: what it has said is flushed, and a request that it has not answered is."""
        self._upstream = None
        if self._is_ending:
            return
        if self._owed and self._answers.is_between:
            self._answer_now(_UNREACHABLE)
        else:
            self.end()

    def hold(self) -> None:
        """The router does not keep up: no more is read from the client."""
        if not self._is_ending:
            self._is_held, self._deadline = True, _NEVER
            self._read(False)

    def release(self) -> None:
        if not self._is_ending:
            self._is_held = False
            self._put_off(was_within_head=False)
            self._read(True)

    def _read(self, wanted: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    def _on_answered(self) -> None:
        self._owed -= 1
        if self._owed < 0:
            self.end()  # what nobody has asked for is no answer to what comes next
        elif self._owed == 0 and self._refusal is not None:
            self._answer_now(self._refusal)
        elif self._owed == 0:
            self._put_off(was_within_head=True)

    # Ends.

    def _refuse(self, refusal: Refusal) -> None:
        """Answers in turn: behind the answers to all requests that were passed on."""
        if self._reader.is_within_body and (self._owed > 1 or not self._answers.is_between):
            # What is wrong with the rest of a request cannot be said within the answer to it.
            self.abort()
        elif self._reader.is_within_body or not self._owed:
            self._answer_now(refusal)
        else:
            self._refusal, self._deadline = refusal, _NEVER

    def _answer_now(self, refusal: Refusal) -> None:
        if self._transport is not None and not self._is_ending:
            self._transport.write(refusal.render())
            self.end()

    def end(self) -> None:
        """Closes when all is flushed. What the client still sends is thrown away: unread, it would cost the answer."""
        self._drop_upstream()
        if self._transport is None or self._is_ending:
            return
        self._is_ending = True
        self._deadline = self._loop.time() + self._settings.linger_seconds
        if not self._transport.is_closing():
            self._transport.write_eof()
        self._read(True)

    def abort(self) -> None:
        self._is_ending = True
        self._drop_upstream()
        if self._transport is not None:
            self._transport.abort()

    def _drop_upstream(self) -> None:
        self._outgoing.clear()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()

    # Time.

    def _put_off(self, *, was_within_head: bool) -> None:
        """Sets the deadline for the next thing that is the client's to do; a head that has begun keeps its own."""
        if self._is_ending or self._refusal is not None or self._is_held:
            return
        now, settings = self._loop.time(), self._settings
        if self._reader.is_within_head:
            if not was_within_head:
                self._deadline = now + settings.head_seconds
        elif self._reader.is_within_body:
            self._deadline = now + settings.stall_seconds
        else:
            self._deadline = _NEVER if self._owed else now + settings.idle_seconds

    def check_deadline(self, now: float) -> None:
        """Ends the connection if its client has let the time pass."""
        if now < self._deadline:
            return
        if self._is_ending:
            self._check_flushing(now)
        elif self._reader.is_within_head or self._reader.is_within_body:
            self._reader.stop()
            self._refuse(_TOO_SLOW)
        else:
            self.end()

    def _check_flushing(self, now: float) -> None:
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unsent and unsent != self._unsent_bytes:
            self._unsent_bytes, self._deadline = unsent, now + self._settings.linger_seconds
        else:
            self.abort()

    @property
    def is_idle(self) -> bool:
        """Nothing runs, and no request has begun."""
        return not (self._owed or self._reader.is_within_head or self._is_ending)

    @property
    def is_flushed(self) -> bool:
        """The router has closed its end, and the client has been sent all that came of it."""
        return self._upstream is None and (self._transport is None or not self._transport.get_write_buffer_size())


class AnswerWatch:
    """Sees where answers begin and end in the router's bytes. Informational ones do not count."""

    def __init__(self, on_answered: Callable[[], None]) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._on_answered = on_answered
        self.is_between = True
        self.is_lost = False

    def feed(self, data: bytes) -> None:
        if self.is_lost:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.is_lost, self.is_between = True, False

    def on_message_begin(self) -> None:
        self.is_between = False

    def on_message_complete(self) -> None:
        self.is_between = True
        if self._parser.get_status_code() >= 200:
            self._on_answered()


class _RouterConnection(asyncio.Protocol):
    """Hands on to the client's connection what happens on the router's."""

    def __init__(self, client: ClientConnection) -> None:
        self._client = client
        # One call less for every token.
        self.data_received = client.router_answered  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.router_connected(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.router_lost()

    def pause_writing(self) -> None:
        self._client.hold()

    def resume_writing(self) -> None:
        self._client.release()
