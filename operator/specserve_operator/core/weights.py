"""Where an engine finds the weights of a model, from the URI in the spec."""

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

# Claims are mounted read-only below this folder, each under its own name.
CLAIMS_MOUNT = "/var/lib/specserve/claims"

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?")


class UnsupportedUriError(ValueError):
    """A URI that this version cannot serve from; the message says what it can."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A folder in the container, or a hub id with its revision. `claim`: the PersistentVolumeClaim it lies on."""

    path_or_id: str
    revision: str | None = None
    claim: str | None = None


def locate_weights(uri: str) -> Weights:
    """Raises UnsupportedUriError."""
    scheme, _, rest = uri.partition("://")
    match scheme:
        case "file":
            return Weights(unquote(urlsplit(uri).path))
        case "pvc":
            claim, _, path = rest.partition("/")
            return Weights(f"{CLAIMS_MOUNT}/{claim}/{unquote(path)}".rstrip("/"), claim=claim)
        case "hf":
            match = _HUB_ID.fullmatch(rest)
            if match is None:
                raise UnsupportedUriError(f"{uri} is not of the form hf://organisation/name@revision")
            return Weights(match["id"], revision=match["revision"])
    raise UnsupportedUriError(f"{scheme}:// is not supported in this version; use hf://, pvc:// or file:// ({uri})")
