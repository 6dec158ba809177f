"""OpenAI error bodies, as the engine's own server words them."""

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

Header = tuple[bytes, bytes]

_TYPES: Final = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "BadRequestError",
    HTTPStatus.REQUEST_TIMEOUT: "BadRequestError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "BadRequestError",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "BadRequestError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


def error_object(status: HTTPStatus, message: str, *, param: str | None = None) -> dict[str, object]:
    """`{"error": {...}}` with the fields OpenAI clients read."""
    kind = _TYPES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status.value}}


def error_body(status: HTTPStatus, message: str, *, param: str | None = None) -> bytes:
    return json.dumps(error_object(status, message, param=param)).encode()


def stream_error(message: str) -> bytes:
    """Ends an event stream so that its client sees an error and not a short answer."""
    body = error_body(HTTPStatus.INTERNAL_SERVER_ERROR, message)
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"


def json_headers(body: bytes, extra: Sequence[Header] = ()) -> list[Header]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *extra]
