"""The plaintext port of a pod whose requests come over TLS: probes and metrics, and nothing else."""

from http import HTTPStatus
from typing import Final

from specserve_workers.frontend.errors import error_body, json_headers
from specserve_workers.frontend.middleware import App, Receive, Scope
from specserve_workers.frontend.responses import Send

# The kubelet and Prometheus have no certificates.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})


def refuse_over_plaintext(app: App, *, https_port: int) -> App:
    """`app`, with every path but `OPEN_PATHS` answered by 403."""

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            text = f"Requests to this pod are encrypted: port {https_port}, for decode pods of its service."
            await answer_forbidden(send, text)
        else:
            await send({"type": "websocket.close", "code": 1008})

    return gate


async def answer_forbidden(send: Send, message: str) -> None:
    """A 403 after which the connection is closed."""
    body = error_body(HTTPStatus.FORBIDDEN, message)
    headers = json_headers(body, [(b"connection", b"close")])
    await send({"type": "http.response.start", "status": HTTPStatus.FORBIDDEN.value, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
