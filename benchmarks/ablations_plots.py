"""The learning curves of the ablations, one panel per group, written by matplotlib as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from ablations_tables import BASE, Row

matplotlib.use("svg")
import matplotlib.pyplot as plt

matplotlib.rcParams.update(
    {"svg.hashsalt": "shoal", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)
# The arms of each panel, after the one they are compared with; all arms would hide each other.
PANELS = {
    "sampling seed": (BASE, "sampling seed 101", "sampling seed 102"),
    "loss": tuple(f"{name}, 8 updates" for name in ("masked", "grpo", "gspo", "vespo", "dro")),
    "group size": (BASE, "2 rollouts per prompt", "16 rollouts per prompt"),
    "staleness": (BASE, "max_async_level 1", "max_async_level 4"),
    "weights": (BASE, "LoRA, rank 16", "LoRA, rank 16, 10 times the learning rate"),
    "replacement": (BASE, "skip", "keep"),
}


def write(rows: Sequence[Row], path: Path) -> None:
    found = {row.name: row for row in rows}
    figure, panels = plt.subplots(2, 3, figsize=(10, 5.5), sharex=True, sharey=True)
    for axes, (title, names) in zip(panels.flat, PANELS.items(), strict=True):
        for place, name in enumerate(names):
            if name in found:
                _draw(axes, found[name], f"C{place - 1}" if place else "black")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7, frameon=False, loc="upper left")
    for axes in panels[-1]:
        axes.set_xlabel("step")
    for axes in panels[:, 0]:
        axes.set_ylabel("held-out reward")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def _draw(axes: Any, row: Row, colour: str) -> None:
    curves = [{int(step): value for step, value in run["held_out"].items()} for run in row.runs]
    steps = sorted(curves[0])
    values = [[curve[step] for curve in curves] for step in steps]
    axes.plot(steps, [sum(found) / len(found) for found in values], "o-", markersize=3, color=colour, label=row.name)
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.1, linewidth=0)
