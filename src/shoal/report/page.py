"""Turns the data of a run into one self-contained HTML file.

Model text reaches the page as JSON in inert script blocks and is shown with textContent only; a content security policy
with hashes allows nothing but the scripts and styles of this package. Called by `shoal grpo` at the end of a run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.observability.atomic import write_atomic
from shoal.report.data import collect_overview, collect_rollouts, rollout_steps

SIZE_LIMIT_BYTES = 20_000_000
REPORT_NAME = "report.html"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_STYLES = ("vendor/uplot/uPlot.min.css", "assets/report.css")
_SCRIPTS = (
    "vendor/uplot/uPlot.iife.min.js",
    "assets/base.js",
    "assets/charts.js",
    "assets/rollouts.js",
    "assets/report.js",
)


def write_report(run_dir_path: Path | str, *, limit_bytes: int = SIZE_LIMIT_BYTES) -> Path:
    """Write report.html into the run directory, from nothing but the files in it."""
    run = Path(run_dir_path)
    path = run / REPORT_NAME
    write_atomic(path, render_report(run, limit_bytes=limit_bytes))
    return path


def render_report(run: Path, *, limit_bytes: int = SIZE_LIMIT_BYTES) -> bytes:
    overview = collect_overview(run)
    styles = [_asset(name) for name in _STYLES]
    scripts = [_asset(name) for name in _SCRIPTS]
    frame_bytes = sum(_size(text) for text in (*styles, *scripts, _embed(overview))) + 10_000
    chosen = choose_rollouts(run, limit_bytes - frame_bytes)
    overview["left_out"] = {"steps": chosen.missing, "partly": chosen.partial}
    blocks = [_block("overview", _embed(overview))]
    blocks += [_block(f"rollouts-{step}", text) for step, text in sorted(chosen.texts.items())]
    return _assemble(overview["run"]["name"], styles, scripts, blocks)


@dataclass(slots=True)
class ChosenRollouts:
    """The rollouts that fit: escaped JSON by step, steps of which some groups are missing, steps left out whole."""

    texts: dict[int, str] = field(default_factory=dict)
    partial: dict[int, int] = field(default_factory=dict)  # step → groups left out
    missing: list[int] = field(default_factory=list)


def choose_rollouts(run: Path, budget_bytes: int) -> ChosenRollouts:
    """Last step, first step, then ever finer in between, as long as they fit."""
    chosen = ChosenRollouts()
    for step in spread(rollout_steps(run)):
        groups = [_embed(group) for group in collect_rollouts(run, step)] if budget_bytes > 0 else []
        fitting = list(_take_while_fitting(groups, budget_bytes))
        if not fitting:
            chosen.missing.append(step)
            continue
        chosen.texts[step] = "[" + ",".join(fitting) + "]"
        budget_bytes -= _size(chosen.texts[step]) + 100
        if len(fitting) < len(groups):
            chosen.partial[step] = len(groups) - len(fitting)
            budget_bytes = 0
    chosen.missing.sort()
    return chosen


def _take_while_fitting(groups: Iterable[str], budget_bytes: int) -> Iterator[str]:
    for group in groups:
        budget_bytes -= _size(group) + 1
        if budget_bytes < 0:
            return
        yield group


def spread(steps: list[int]) -> list[int]:
    """The same steps, ordered so that any beginning of the list covers the run evenly; the last one first."""
    if len(steps) <= 2:
        return steps[::-1]
    order = [len(steps) - 1, 0]
    gaps = [(0, len(steps) - 1)]
    while gaps:
        wider = []
        for low, high in gaps:
            middle = (low + high) // 2
            if middle > low:
                order.append(middle)
                wider += [(low, middle), (middle, high)]
        gaps = wider
    return [steps[position] for position in order]


def _embed(value: Any) -> str:
    """JSON that stays inert inside <script>: no character that HTML could take for markup, and no half of a pair."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = _LONE_SURROGATE.sub("\ufffd", text)  # valid in JSON, but browsers choke on them when a page is saved
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _size(text: str) -> int:
    return len(text.encode())


def _block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return resources.files("shoal.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _assemble(name: str, styles: list[str], scripts: list[str], blocks: list[str]) -> bytes:
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    pieces = {
        "POLICY": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "TITLE": escape(name),
        "STYLES": "".join(f"<style>{style}</style>" for style in styles),
        "DATA": "\n".join(blocks),
        "SCRIPTS": "".join(f"<script>{script}</script>" for script in scripts),
    }
    # The frame is split at its markers rather than replaced in turn, so that no content can pose as a marker.
    page = []
    for piece in _asset("assets/frame.html").split("@@"):
        page.append(pieces.get(piece, piece))
    return "".join(page).encode(errors="replace")  # a folder name may hold bytes that are no text
