"""Tells whoever keeps a record per KV block that the connector wrote blocks from another pod.

Such blocks hold the target's KV only, so a drafter's own KV in them is stale and must be filled again. The listener
is called in the engine's worker process, in the engine's thread, after the blocks are written and before the
request that owns them is scheduled. There is one at most: a process has one KV cache, and a record made for an
earlier one of another size must not hear of the blocks of this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

ForeignBlockListener = Callable[[Sequence[int]], None]


@dataclass(slots=True)
class _Registry:
    listener: ForeignBlockListener | None = None


_registry: Final = _Registry()


def set_foreign_block_listener(listener: ForeignBlockListener | None) -> None:
    """Call `listener(block_ids)` for every set of blocks that a pull has written, and no earlier listener any more."""
    _registry.listener = listener


def notify_foreign_blocks(block_ids: Sequence[int]) -> None:
    """Tell the listener, if there is one, that these blocks now hold KV computed elsewhere."""
    if _registry.listener is not None:
        _registry.listener(block_ids)
