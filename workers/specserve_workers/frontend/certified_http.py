"""HTTP behind certificates: uvicorn's own protocol, for the peers of a rule only."""

import asyncio
import logging
import ssl
import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from specserve_workers.frontend.middleware import App, Receive, Scope
from specserve_workers.frontend.plain_port import answer_forbidden
from specserve_workers.frontend.responses import Send
from specserve_workers.identity.channels import PeerRule, ServerTls
from specserve_workers.identity.contexts import peer_uri, server_context

logger = logging.getLogger(__name__)


def certified_settings(tls: ServerTls) -> dict[str, Any]:
    """Arguments of `uvicorn.Config`. Who comes with a certificate that the rule does not allow is told so by 403."""
    return {
        "http": _protocol(tls.rule),
        # An upgraded connection is served by another protocol, which knows of no rule.
        "ws": "none",
        "ssl_context_factory": lambda config, default: server_context(tls.source),
    }


def _protocol(rule: PeerRule) -> type[asyncio.Protocol]:
    class CertifiedPeerProtocol(AutoHTTPProtocol):  # type: ignore[valid-type,misc]  # one of two, as is installed
        """HTTP of one connection, by whoever the certificate of its handshake says."""

        _expiry: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            certificate = transport.get_extra_info("peercert")
            refusal = rule.refusal_of(peer_uri(certificate))
            if refusal is not None:
                logger.warning("refused: %s", refusal)
                self.app = _refusing(refusal)
                return
            # No longer than the certificate: what runs then goes on to its end.
            seconds = ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()
            self._expiry = asyncio.get_running_loop().call_later(seconds, self.shutdown)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._expiry is not None:
                self._expiry.cancel()
            super().connection_lost(exc)

    return CertifiedPeerProtocol


def _refusing(message: str) -> App:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await answer_forbidden(send, message)

    return refuse
