"""Turns the data of one or several runs into one self-contained HTML file, or into JSON for tools.

Model text reaches the page as data in inert script blocks and is shown with textContent only; a content security policy
with hashes allows nothing but the scripts and styles of this package. Called by `shoal report` and at the end of a run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.observability.atomic import write_atomic
from shoal.report.choose import Chosen, as_json, choose_groups, unpack
from shoal.report.data import collect_overview, glossary_of, name_apart

SIZE_LIMIT_BYTES = 20_000_000
REPORT_NAME = "report.html"
_STYLES = ("vendor/uplot/uPlot.min.css", "assets/page.css", "assets/rollouts.css")
_SCRIPTS = (
    "vendor/uplot/uPlot.iife.min.js",
    "assets/base.js",
    "assets/source.js",
    "assets/curves.js",
    "assets/chart.js",
    "assets/tokens.js",
    "assets/rollouts.js",
    "assets/tables.js",
    "assets/app.js",
)


def write_report(
    run: Path | str, *others: Path | str, out: Path | None = None, limit_bytes: int = SIZE_LIMIT_BYTES
) -> Path:
    """Write report.html into the first run's directory, or to `out`, from nothing but the files of the runs."""
    runs = [Path(run), *map(Path, others)]
    path = out or runs[0] / REPORT_NAME
    write_atomic(path, render_report(*runs, limit_bytes=limit_bytes))
    return path


def render_report(*runs: Path, limit_bytes: int = SIZE_LIMIT_BYTES) -> bytes:
    overviews, chosen = collect_report(runs, limit_bytes)
    blocks = [_block("page", _embed(page_data(overviews)))]
    for number, groups in enumerate(chosen):
        heads = [head.as_dict() for step in sorted(groups.heads) for head in groups.heads[step]]
        blocks.append(_block(f"heads-{number}", _embed(heads)))
        blocks += [_block(f"groups-{number}-{step}", "\n".join(groups.packed[step])) for step in sorted(groups.packed)]
    return assemble([overview["run"]["name"] for overview in overviews], blocks)


def report_json(*runs: Path, limit_bytes: int = SIZE_LIMIT_BYTES) -> str:
    """What the page shows, for tools."""
    overviews, chosen = collect_report(runs, limit_bytes)
    data = page_data(overviews)
    for overview, groups in zip(data["runs"], chosen, strict=True):
        overview["rollouts"] = {step: [unpack(text) for text in groups.packed[step]] for step in sorted(groups.packed)}
    return as_json(data)


def collect_report(runs: Sequence[Path], limit_bytes: int) -> tuple[list[dict[str, Any]], list[Chosen]]:
    overviews = [collect_overview(run) for run in runs]
    name_apart(overviews)
    frame_bytes = sum(len(asset(name).encode()) for name in (*_STYLES, *_SCRIPTS)) + 20_000
    room = limit_bytes - frame_bytes - len(_embed(page_data(overviews)).encode())
    chosen = []
    for number, run in enumerate(runs):
        groups = choose_groups(run, room // (len(runs) - number))
        room -= sum(len(text) + 1 for texts in groups.packed.values() for text in texts)
        overviews[number]["left_out"] = groups.left_out(overviews[number]["rollout_steps"])
        chosen.append(groups)
    return overviews, chosen


def page_data(overviews: list[dict[str, Any]], live: bool = False) -> dict[str, Any]:
    return {"live": live, "runs": overviews, "glossary": glossary_of(overviews)}


def assemble(names: Sequence[str], blocks: Sequence[str], live: bool = False) -> bytes:
    """The page around its data. A live one may also ask its own server for more."""
    styles, scripts = [asset(name) for name in _STYLES], [asset(name) for name in _SCRIPTS]
    pieces = {
        "POLICY": f'<meta http-equiv="Content-Security-Policy" content="{content_policy(live)}">',
        "TITLE": escape(" and ".join(names)),
        "STYLES": "".join(f"<style>{style}</style>" for style in styles),
        "DATA": "\n".join(blocks),
        "SCRIPTS": "".join(f"<script>{script}</script>" for script in scripts),
    }
    # The frame is split at its markers rather than replaced in turn, so that no content can pose as a marker.
    page = [pieces.get(piece, piece) for piece in asset("assets/frame.html").split("@@")]
    return "".join(page).encode(errors="replace")  # a folder name may hold bytes that are no text


def content_policy(live: bool = False) -> str:
    allowed = [
        "default-src 'none'",
        f"script-src {' '.join(_hash(asset(name)) for name in _SCRIPTS)}",
        f"style-src {' '.join(_hash(asset(name)) for name in _STYLES)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(allowed)


def data_block(overviews: list[dict[str, Any]], live: bool) -> str:
    return _block("page", _embed(page_data(overviews, live)))


def _embed(value: Any) -> str:
    """JSON that stays inert inside <script>: no character that HTML could take for markup."""
    return as_json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>'


def asset(name: str) -> str:
    return resources.files("shoal.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
