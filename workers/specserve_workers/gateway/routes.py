"""Which requests may pass: an allow-list of paths with their methods. Pure."""

import re
from http import HTTPStatus
from typing import Final

from specserve_workers.gateway.refusals import Refusal

# The router's own, of which only these say nothing but whether it is well.
PROBES: Final = frozenset({b"/health", b"/liveness", b"/readiness"})

_READ: Final = frozenset({b"GET", b"HEAD"})
_API_METHODS: Final = frozenset({b"GET", b"POST", b"DELETE", b"OPTIONS"})
_POST: Final = frozenset({b"POST", b"OPTIONS"})
_API: Final = b"/v1/"
# What the engine serves beside /v1 that computes something from a request's body and changes nothing.
_INFERENCE: Final = (
    b"/classify",
    b"/cohere/v2/chat",
    b"/detokenize",
    b"/generative_scoring",
    b"/pooling",
    b"/rerank",
    b"/score",
    b"/tokenize",
    b"/v2/embed",
    b"/v2/rerank",
)
_METHODS: Final[dict[bytes, frozenset[bytes]]] = {
    **dict.fromkeys(PROBES, _READ),
    **dict.fromkeys(_INFERENCE, _POST),
    b"/ping": frozenset({b"GET", b"POST"}),
    b"/version": frozenset({b"GET"}),
}
# Under /v1, and yet they change what the engine serves.
_MANAGEMENT: Final = frozenset({b"load_lora_adapter", b"unload_lora_adapter"})

# Nothing that any server behind could read as another path: no empty segments, one at the end included, since the
# engine answers that with a redirect which the router follows; no escapes, which the engine decodes; no backslashes.
_PATH: Final = re.compile(rb"(?:/[A-Za-z0-9_~:@+,=-][A-Za-z0-9._~:@+,=-]*)+")
_QUERY: Final = re.compile(rb"[\x21-\x22\x24-\x7e]*")


def find_refusal(method: bytes, target: bytes) -> Refusal | None:
    """Why a request may not pass; None if it may. `target` is the second word of its first line, as it came."""
    path, _, query = target.partition(b"?")
    methods = _methods_of(path) if _PATH.fullmatch(path) and _QUERY.fullmatch(query) else None
    if methods is None:
        return Refusal(HTTPStatus.NOT_FOUND, "This path is not served here.")
    if method not in methods:
        allow = b", ".join(sorted(methods))
        return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "This path has no such method.", headers=((b"allow", allow),))
    return None


def is_probe(target: bytes) -> bool:
    return target in PROBES


def _methods_of(path: bytes) -> frozenset[bytes] | None:
    if not path.startswith(_API):
        return _METHODS.get(path)
    return None if _MANAGEMENT.intersection(path.lower().split(b"/")) else _API_METHODS
