"""The call to a prefill pod: at most two tries, each bounded, and a cause for every end without a transfer."""

import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp

from specserve_workers.control.stats import FallbackCause
from specserve_workers.frontend.disaggregation import (
    NotHeldError,
    RevisionMismatchError,
    TransferAnswerError,
    TransferParams,
    parse_transfer_answer,
)
from specserve_workers.frontend.peers import PeerRotation, PrefillTimeModel
from specserve_workers.identity.contexts import PeerContext
from specserve_workers.identity.material import NoIdentityError

logger = logging.getLogger(__name__)

# An answer holds one token and the transfer parameters.
MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Either transfer parameters or the cause for which there are none."""

    params: TransferParams | None = None
    cause: FallbackCause | None = None


class _TryFailedError(Exception):
    """One peer did not deliver.

    `try_next`: another one may. `exclude`: the peer cannot be reached, so the next calls leave it out for a while; one
    that answers, however badly, is asked again.
    """

    def __init__(self, cause: FallbackCause, message: str, *, try_next: bool = True, exclude: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.try_next = try_next
        self.exclude = exclude


class PrefillClient:
    """Asks prefill pods for a prompt's KV. One per process; safe for concurrent calls of one event loop."""

    def __init__(
        self,
        addresses: Callable[[], Awaitable[tuple[str, ...]]],
        *,
        target_revision: str,
        connect_timeout_seconds: float,
        tls: PeerContext | None = None,
        rotation: PeerRotation | None = None,
        times: PrefillTimeModel | None = None,
    ) -> None:
        self._addresses = addresses
        self._revision = target_revision
        self._connect_timeout_seconds = connect_timeout_seconds
        self._tls = tls
        self._rotation = rotation or PeerRotation()
        self._times = times or PrefillTimeModel()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        # No cookies, no proxies from the environment, no limit of its own: the engine's queue is the limit.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def prefill(self, path: str, body: Mapping[str, object], *, headers: Mapping[str, str]) -> PrefillResult:
        """Has the prompt of `body` prefilled. Cancelling this call ends the prefill on the peer as well."""
        addresses = await self._addresses()
        if not addresses:
            return PrefillResult(cause=FallbackCause.NO_PEERS)
        try:
            context = None if self._tls is None else self._tls.current()
        except NoIdentityError as error:
            logger.warning("prefill here: %s", error)
            return PrefillResult(cause=FallbackCause.NO_IDENTITY)
        cause = FallbackCause.PEERS_EXCLUDED
        data = json.dumps(body).encode()
        for peer in self._rotation.choose(addresses, now=time.monotonic()):
            try:
                return PrefillResult(params=await self._try(peer, path, data, headers, context=context))
            except _TryFailedError as failure:
                cause = failure.cause
                logger.warning("prefill on %s: %s (%s)", peer, failure, cause)
                if failure.exclude:
                    self._rotation.exclude(peer, now=time.monotonic())
                if not failure.try_next:
                    break
        return PrefillResult(cause=cause)

    async def _try(
        self, peer: str, path: str, data: bytes, headers: Mapping[str, str], *, context: ssl.SSLContext | None
    ) -> TransferParams:
        if self._session is None:
            raise RuntimeError("PrefillClient.start() has not been called")
        deadline_seconds = self._times.deadline_seconds(len(data))
        timeout = aiohttp.ClientTimeout(total=deadline_seconds, sock_connect=self._connect_timeout_seconds)
        began = time.monotonic()
        try:
            async with self._session.post(
                f"{'http' if context is None else 'https'}://{peer}{path}",
                data=data,
                headers={**headers, "content-type": "application/json"},
                timeout=timeout,
                allow_redirects=False,
                ssl=True if context is None else context,
                server_hostname=None if self._tls is None else self._tls.server_name,
            ) as response:
                _check_status(response.status)
                raw = await response.content.read(MAX_ANSWER_BYTES)
                while len(raw) < MAX_ANSWER_BYTES and (more := await response.content.read(MAX_ANSWER_BYTES)):
                    raw += more
        except aiohttp.ClientSSLError as error:
            message = f"what answers has no certificate of a prefill pod of this service: {error}"
            raise _TryFailedError(FallbackCause.PREFILL_IDENTITY, message, exclude=True) from error
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise _TryFailedError(FallbackCause.PREFILL_CONNECT, f"no connection: {error}", exclude=True) from error
        except TimeoutError as error:
            self._times.observe(len(data), deadline_seconds)
            raise _TryFailedError(
                FallbackCause.PREFILL_TIMEOUT, f"no answer within {deadline_seconds:.1f} s", exclude=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            message = f"the connection broke: {type(error).__name__}: {error}"
            raise _TryFailedError(FallbackCause.PREFILL_ERROR, message, exclude=True) from error
        params = self._parse(raw)
        self._times.observe(len(data), time.monotonic() - began)
        return params

    def _parse(self, raw: bytes) -> TransferParams:
        try:
            return parse_transfer_answer(json.loads(raw), revision=self._revision)
        except RevisionMismatchError as error:
            raise _TryFailedError(FallbackCause.REVISION_MISMATCH, str(error)) from error
        except NotHeldError as error:
            raise _TryFailedError(FallbackCause.NOT_HELD, str(error)) from error
        except (TransferAnswerError, ValueError, RecursionError) as error:
            raise _TryFailedError(FallbackCause.BAD_ANSWER, str(error)) from error


def _check_status(status: int) -> None:
    if 400 <= status < 500 and status != 429:
        # The request itself is at fault; this pod's engine says so as well.
        raise _TryFailedError(FallbackCause.PREFILL_REFUSED, f"status {status}", try_next=False)
    if status != 200:
        raise _TryFailedError(FallbackCause.PREFILL_ERROR, f"status {status}")
