"""The plots of the performance page: roofline, scaling of decoding, running ahead. Written by matplotlib as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from performance import Results

# Reproducible files: no date, fixed ids.
matplotlib.rcParams.update(
    {"svg.hashsalt": "shoal", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)
KINDS = {"decode": "o", "prefill": "s", "training": "^"}
RATES = (10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)


def write(results: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if results.rows["rollout"]:
        _save(_roofline(results), folder / "performance_roofline.svg")
    if results.rows["growth"]:
        _save(_growth(results), folder / "performance_growth.svg")
    if results.rows["asynchronous"]:
        _save(_asynchronous(results), folder / "performance_asynchronous.svg")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def _points(results: Results) -> list[tuple[str, str, float, float]]:
    """(kind, name, operations per byte, operations per second)."""
    found = []
    for row in (row for row in results.rows["rollout"] if row["group"] == 1):
        name = f"{row['shape']}, {row['sequences']}"
        decode, prefill = row["decode"], row["prefill"]
        found.append(("decode", name, decode["operations"] / decode["bytes"], decode["operations"] / decode["seconds"]))
        found.append(
            ("prefill", name, prefill["operations"] / prefill["bytes"], prefill["operations"] / row["prefill_s"])
        )
    for row in results.rows["train"]:
        intensity = row["operations"] / row["bytes"]
        found.append(("training", f"{row['shape']}, {row['name']}", intensity, row["operations"] / row["seconds"]))
    return found


def _roofline(results: Results) -> Any:
    rates = next(found["rates"] for found in results.files.values() if "rates" in found)
    points = _points(results)
    low, high = min(p[2] for p in points) / 3, max(p[2] for p in points) * 3
    ridge = rates["operations_per_s"] / rates["bytes_per_s"]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    corners = sorted({low, min(max(ridge, low), high), high})
    roof = [min(x * rates["bytes_per_s"], rates["operations_per_s"]) / 1e12 for x in corners]
    axes.plot(corners, roof, color="black", label="limit")
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(point[1] for point in points))}
    for kind, name, intensity, rate in points:
        axes.plot(intensity, rate / 1e12, KINDS[kind], color=colours[name], label=f"{kind}: {name}")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def _growth(results: Results) -> Any:
    labels = {
        "sequences": "sequences",
        "context": "context tokens (128 sequences)",
        "group": "group size (512 sequences)",
    }
    figure, panels = plt.subplots(1, len(labels), figsize=(10, 3), sharey=True)
    for axes, (axis, label) in zip(panels, labels.items(), strict=True):
        rows = [row for row in results.rows["growth"] if row["axis"] == axis]
        values = [row["value"] for row in rows]
        limits = [min(row["limit_bytes"], row["limit_operations"]) for row in rows]
        axes.plot(values, limits, color="black", label="limit, decoding")
        axes.plot(values, [row["decode_tokens_per_s"] for row in rows], "o-", label="decoding")
        axes.plot(values, [row["tokens_per_s"] for row in rows], "s--", label="with prefill")
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.set_xticks(values, [f"{value:,}" for value in values], rotation=45, minor=False)
        axes.set_yticks(RATES, [f"{rate // 1000}k" for rate in RATES])
        axes.minorticks_off()
    panels[0].set_ylabel("tokens/s")
    panels[0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    return figure


def _asynchronous(results: Results) -> Any:
    """Gain over level 0, then the idle share of sampler and trainer."""
    rows = results.rows["asynchronous"]
    kinds = list(dict.fromkeys((row["layout"], row["name"]) for row in rows))
    levels = sorted({row["level"] for row in rows})
    wide = 0.8 / len(kinds)
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2))
    parts = (
        ("gain", "rollouts/s vs level 0"),
        ("sampler_idle", "sampler idle"),
        ("trainer_idle", "trainer idle"),
    )
    for axes, (key, label) in zip(panels, parts, strict=True):
        for place, (layout, name) in enumerate(kinds):
            mine = {row["level"]: row.get(key) for row in rows if (row["layout"], row["name"]) == (layout, name)}
            at = [i + (place - (len(kinds) - 1) / 2) * wide for i in range(len(levels))]
            values = [mine.get(level) or 0.0 for level in levels]
            if any(mine.values()):
                axes.bar(at, values, wide * 0.9, color=f"C{place}", label=f"{layout}: {name}")
        axes.set(xticks=range(len(levels)), xticklabels=levels, xlabel="max_async_level", ylabel=label)
    panels[0].axhline(1.5, color="black", linewidth=0.8, linestyle="--")
    figure.tight_layout()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    return figure
