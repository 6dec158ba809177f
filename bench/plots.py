"""Plots of paired comparisons: every ratio as a point, the median with its interval, and the bar."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from bench.pairs import Claim

mpl.use("Agg")
HELD, MISSED, UNDECIDED = "#2a7f3f", "#b3372f", "#8a6d1f"


def plot_ratios(
    path: Path, claims: Sequence[Claim], *, ratios: Mapping[str, Sequence[float]], bars: Mapping[str, float]
) -> None:
    """Writes one column per claim. `ratios` and `bars` go by claim id."""
    from matplotlib import pyplot as plt

    colours = {"held": HELD, "missed": MISSED, "undecided": UNDECIDED}
    figure, axes = plt.subplots(figsize=(1.5 + 1.6 * len(claims), 3.6), layout="constrained")
    for column, claim in enumerate(claims):
        bar = bars[claim.id]
        colour = colours[claim.verdict(bar)]
        points = ratios[claim.id]
        offsets = np.random.default_rng(0).uniform(-0.12, 0.12, len(points))
        axes.scatter(column + offsets, points, s=12, color=colour, alpha=0.35, linewidths=0)
        spread = [[claim.value - claim.low], [claim.high - claim.value]]
        axes.errorbar(column, claim.value, yerr=spread, fmt="o", color=colour, capsize=6, linewidth=2)
        axes.hlines(bar, column - 0.3, column + 0.3, color="black", linestyles="dashed", linewidth=1)
        axes.annotate(f"{claim.value:.3f}", (column + 0.16, claim.value), va="center", fontsize=9)
    axes.set_xticks(range(len(claims)), [f"{c.id}\n{c.verdict(bars[c.id])}" for c in claims])
    axes.set_xlim(-0.6, len(claims) - 0.4)
    axes.set_ylabel("throughput, ours / theirs")
    axes.set_title("points: pairs; dashed: the bar", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
