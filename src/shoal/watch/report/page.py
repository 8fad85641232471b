"""Turns the data of one or more runs into one self-contained HTML file, or into JSON for other programs.

Model text is stored in inert script blocks and shown with textContent only. A content security policy with hashes
allows only the scripts and styles of this package. `choose_groups` selects the groups of a report of limited size: the
newest, the best, the worst and an even sample, in turn. Called by `shoal report`, by the end of a run and
by the live page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.runs.files import write_atomic
from shoal.watch.report.data import collect_overview, glossary_of, make_names_unique
from shoal.watch.report.rollouts import GroupHead, index_step, read_group, rollout_steps, step_bytes

SIZE_LIMIT_BYTES = 20_000_000
READ_LIMIT_BYTES = 2_000_000_000  # rollout files read for one report
MAX_MISSES = 40  # stop after this many groups in a row that do not fit
REPORT_NAME = "report.html"


@dataclass(frozen=True, slots=True)
class Template:
    """The parts of a page. They are its only scripts and styles."""

    frame: str
    styles: tuple[str, ...]
    scripts: tuple[str, ...]


REPORT = Template(
    "assets/frame.html",
    ("vendor/uplot/uPlot.min.css", "assets/page.css", "assets/rollouts.css"),
    (
        "vendor/uplot/uPlot.iife.min.js",
        "assets/base.js",
        "assets/source.js",
        "assets/curves.js",
        "assets/chart.js",
        "assets/tokens.js",
        "assets/rollouts.js",
        "assets/tables.js",
        "assets/app.js",
    ),
)
LIST = Template("assets/runs.html", ("assets/page.css",), ("assets/base.js", "assets/runs.js"))
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def write_report(
    run: Path | str, *others: Path | str, out: Path | None = None, limit_bytes: int = SIZE_LIMIT_BYTES
) -> Path:
    """Write report.html into the directory of the first run, or to `out`."""
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
    return assemble(" and ".join(overview["run"]["name"] for overview in overviews), blocks)


def report_json(*runs: Path, limit_bytes: int = SIZE_LIMIT_BYTES) -> str:
    """The data of the page as JSON."""
    overviews, chosen = collect_report(runs, limit_bytes)
    data = page_data(overviews)
    for overview, groups in zip(data["runs"], chosen, strict=True):
        overview["rollouts"] = {step: [unpack(text) for text in groups.packed[step]] for step in sorted(groups.packed)}
    return as_json(data)


def collect_report(runs: Sequence[Path], limit_bytes: int) -> tuple[list[dict[str, Any]], list[SelectedRun]]:
    overviews = [collect_overview(run) for run in runs]
    make_names_unique(overviews)
    frame_bytes = sum(len(asset(name).encode()) for name in (*REPORT.styles, *REPORT.scripts)) + 20_000
    budget = limit_bytes - frame_bytes - len(_embed(page_data(overviews)).encode())
    chosen = []
    for number, run in enumerate(runs):
        groups = choose_groups(run, budget // (len(runs) - number))
        budget -= sum(len(text) + 1 for texts in groups.packed.values() for text in texts)
        overviews[number]["left_out"] = groups.left_out(overviews[number]["rollout_steps"])
        chosen.append(groups)
    return overviews, chosen


def page_data(overviews: list[dict[str, Any]], live: bool = False) -> dict[str, Any]:
    return {"live": live, "runs": overviews, "glossary": glossary_of(overviews)}


def assemble(title: str, blocks: Sequence[str], live: bool = False, template: Template = REPORT) -> bytes:
    """The page with its data. A live page may also send requests to its own server."""
    styles, scripts = [asset(name) for name in template.styles], [asset(name) for name in template.scripts]
    pieces = {
        "POLICY": f'<meta http-equiv="Content-Security-Policy" content="{content_policy(live, template)}">',
        "TITLE": escape(title),
        "STYLES": "".join(f"<style>{style}</style>" for style in styles),
        "DATA": "\n".join(blocks),
        "SCRIPTS": "".join(f"<script>{script}</script>" for script in scripts),
    }
    # Split the frame at its markers instead of replacing them one by one, so that content cannot act as a marker.
    page = [pieces.get(piece, piece) for piece in asset(template.frame).split("@@")]
    return "".join(page).encode(errors="replace")  # a folder name may contain bytes that are not UTF-8


def content_policy(live: bool = False, template: Template = REPORT) -> str:
    allowed = [
        "default-src 'none'",
        f"script-src {' '.join(_hash(asset(name)) for name in template.scripts)}",
        f"style-src {' '.join(_hash(asset(name)) for name in template.styles)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(allowed)


def data_block(data: Any) -> str:
    """The data of a live page."""
    return _block("page", _embed(data))


def _embed(value: Any) -> str:
    """JSON for a <script> block, without characters that HTML could read as markup."""
    return as_json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>'


def asset(name: str) -> str:
    return resources.files("shoal.watch.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


@dataclass(slots=True)
class SelectedRun:
    """The groups of one run that fit into the report, by step, in the order of the files, and their packed data."""

    heads: dict[int, list[GroupHead]] = field(default_factory=dict)
    packed: dict[int, list[str]] = field(default_factory=dict)
    groups: int = 0  # number of groups considered
    unread_steps: list[int] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(len(heads) for heads in self.heads.values())

    def left_out(self, steps: Sequence[int]) -> dict[str, Any]:
        """For the note on the page: numbers of groups, and steps without any."""
        missing = [step for step in steps if step not in self.heads]
        return {"kept": self.kept, "groups": self.groups, "unread_steps": len(self.unread_steps), "steps": missing}


def choose_groups(run: Path, budget_bytes: int) -> SelectedRun:
    chosen = SelectedRun()
    heads = list(_read_heads(run, chosen))
    chosen.groups = len(heads)
    packed: dict[tuple[int, str], str] = {}
    misses = 0
    for head in _in_turn(heads):
        if misses >= MAX_MISSES or budget_bytes <= 0:
            break
        text = pack(read_group(run, head))
        cost = len(text) + len(json.dumps(head.as_dict())) + 2
        if cost > budget_bytes:
            misses += 1
            continue
        misses, budget_bytes = 0, budget_bytes - cost
        packed[head.step, head.group] = text
    for head in heads:  # in the order of the files
        if (head.step, head.group) in packed:
            chosen.heads.setdefault(head.step, []).append(head)
            chosen.packed.setdefault(head.step, []).append(packed[head.step, head.group])
    return chosen


def _read_heads(run: Path, chosen: SelectedRun) -> Iterator[GroupHead]:
    """The heads of all groups. For a run above READ_LIMIT_BYTES: of steps spread evenly over the run."""
    budget, taken = READ_LIMIT_BYTES, []
    for step in spread(rollout_steps(run)):
        budget -= step_bytes(run, step)
        if budget < 0:
            chosen.unread_steps.append(step)
        else:
            taken.append(step)
    for step in sorted(taken):
        yield from index_step(run, step)


def _in_turn(heads: list[GroupHead]) -> Iterator[GroupHead]:
    """The next group of each order in turn, without repetition."""
    scored = [head for head in heads if head.mean is not None]
    by_step: dict[int, list[GroupHead]] = {}
    for head in heads:
        by_step.setdefault(head.step, []).append(head)
    spread_steps = spread(sorted(by_step))
    depth = max((len(groups) for groups in by_step.values()), default=0)
    orders: list[list[GroupHead]] = [
        sorted(heads, key=lambda head: -head.step),
        sorted(scored, key=_mean, reverse=True),
        sorted(scored, key=_mean),
        [by_step[step][i] for i in range(depth) for step in spread_steps if i < len(by_step[step])],
    ]
    seen: set[int] = set()
    for position in range(len(heads)):
        for order in orders:
            if position < len(order) and id(order[position]) not in seen:
                seen.add(id(order[position]))
                yield order[position]


_mean: Callable[[GroupHead], float] = lambda head: head.mean or 0.0  # noqa: E731


def spread(steps: list[int]) -> list[int]:
    """The steps in an order in which every prefix covers the run evenly; the last step first."""
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


def as_json(value: Any) -> str:
    """JSON without lone surrogates, which browsers reject."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return _LONE_SURROGATE.sub("\ufffd", text)


def pack(value: Any) -> str:
    """Compressed JSON in base64, which contains no HTML markup."""
    return base64.b64encode(gzip.compress(as_json(value).encode(), 6, mtime=0)).decode()


def unpack(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))
