"""Revision hashes: they name workloads and decide which pods may exchange KV caches.

The target revision covers what decides the content and the layout of a KV cache: weights, image and the engine flags
that both pools share. The pool revision covers everything in a pod template, the target revision included.
Anything that can change in a running pod (policy, lengths, mode) is in neither.
"""

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specserve_operator.core.weights import Weights

if TYPE_CHECKING:
    from specserve_operator.core.launch import EngineLaunch, GatewayLaunch

# Raised when the same launch renders another pod template: a new name, under which users may have it (core/pinning.py).
RENDER_VERSION = 2
REVISION_LENGTH = 10


def target_revision(model: Weights, image: str, *, engine_args: tuple[str, ...]) -> str:
    """10 hex digits. The order of `engine_args` counts: the engine reads them in order."""
    return digest({"model": asdict(model), "image": image, "args": engine_args, "render": RENDER_VERSION})


def pool_revision(launch: "EngineLaunch | GatewayLaunch") -> str:
    """10 hex digits."""
    return digest({"launch": asdict(launch), "render": RENDER_VERSION})


def digest(value: Any) -> str:
    """The first 10 hex digits of the SHA-256 of `value`, a tree of JSON values, in canonical form."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:REVISION_LENGTH]


def canonical_json(value: Any) -> str:
    """The same text for equal values: sorted keys, no spaces. Raises TypeError for what JSON has not."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
