"""From a plan to plain Kubernetes objects, ready for server-side apply. No I/O and no decisions.

render(plan) -> list[Manifest]         in the order in which they are to be applied
render_seeds(plan) -> list[Manifest]   to be applied before, as another field manager, which takes nothing from others
"""

from specserve_operator.render.objects import render, render_seeds

__all__ = ["render", "render_seeds"]
