"""From a plan to plain Kubernetes objects, ready for server-side apply. No I/O and no decisions.

render(plan) -> list[Manifest]     in the order in which they are to be applied
"""

from specserve_operator.render.objects import render

__all__ = ["render"]
