"""What of a live object is ours: the values that stand where the rendered object has some."""

import hashlib
import json
from typing import Any

from specserve_operator.core.objects import Manifest


def owned_values(rendered: Any, live: Any) -> Any:
    """`live` cut down to the fields of `rendered`. A list of another length is ours as a whole."""
    if isinstance(rendered, dict) and isinstance(live, dict):
        return {key: owned_values(value, live.get(key)) for key, value in rendered.items()}
    if isinstance(rendered, list | tuple) and isinstance(live, list | tuple) and len(rendered) == len(live):
        return [owned_values(a, b) for a, b in zip(rendered, live, strict=True)]
    return live


def digest_of_owned(rendered: Manifest, live: Manifest) -> int:
    """A number that is another one when a value that `rendered` sets is changed in `live`."""
    text = json.dumps(owned_values(rendered, live), sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
