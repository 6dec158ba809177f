"""What is answered here instead of by the router: an OpenAI error, after which the connection ends."""

from dataclasses import dataclass
from http import HTTPStatus

from specserve_workers.frontend.errors import Header, error_body, json_headers


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer with this status. `message` is for the client."""

    status: HTTPStatus
    message: str
    headers: tuple[Header, ...] = ()

    def render(self) -> bytes:
        """The whole answer as it goes over the connection."""
        body = error_body(self.status, self.message)
        first = f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n".encode()
        headers = json_headers(body, [*self.headers, (b"connection", b"close")])
        return first + b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n" + body


def malformed(message: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, message)


def unavailable(message: str) -> Refusal:
    """Worth another try, here or elsewhere."""
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message, headers=((b"retry-after", b"1"),))
