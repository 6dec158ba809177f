"""Whether an object already is as it was rendered. Pure."""

from typing import Any

from specserve_operator.core.objects import Manifest


def is_as_rendered(rendered: Manifest, live: Manifest | None) -> bool:
    """True if every field of `rendered` is so in `live`, which may have more: defaults, status, others' fields.

    Lists must be of one length, since a shorter one may mean that an entry was taken out. A value that the cluster
    writes in another way (`1000m` for `1`) counts as a difference; applying it again changes nothing.
    """
    return live is not None and _holds(rendered, live)


def _holds(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_holds(value, found.get(key)) for key, value in wanted.items())
    if isinstance(wanted, list | tuple):
        is_comparable = isinstance(found, list | tuple) and len(wanted) == len(found)
        return is_comparable and all(_holds(a, b) for a, b in zip(wanted, found, strict=True))
    return bool(wanted == found)
