"""Which groups go into a report of limited size: the newest, the best, the worst and an even sample, in turn.

What is left out is counted and told on the page; the live page and the run directory have all of it.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observability.run_dir import rollouts_path
from shoal.report.rollouts import GroupHead, index_step, read_group, rollout_steps

READ_LIMIT_BYTES = 2_000_000_000  # of rollout files looked at for one report
MISSES = 40  # groups in a row that do not fit; then the rest will not either
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class Chosen:
    """Groups that fit, by step, in the order of the files; each packed as the page takes it."""

    heads: dict[int, list[GroupHead]] = field(default_factory=dict)
    packed: dict[int, list[str]] = field(default_factory=dict)
    groups: int = 0  # that were looked at
    unread_steps: list[int] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(len(heads) for heads in self.heads.values())

    def left_out(self, steps: Sequence[int]) -> dict[str, Any]:
        """What the page has to say: how many groups, and the steps of which nothing is here."""
        missing = [step for step in steps if step not in self.heads]
        return {"kept": self.kept, "groups": self.groups, "unread_steps": len(self.unread_steps), "steps": missing}


def choose_groups(run: Path, budget_bytes: int) -> Chosen:
    chosen = Chosen()
    heads = list(_look_at(run, chosen))
    chosen.groups = len(heads)
    packed: dict[tuple[int, str], str] = {}
    misses = 0
    for head in _in_turn(heads):
        if misses >= MISSES or budget_bytes <= 0:
            break
        text = pack(read_group(run, head))
        cost = len(text) + len(json.dumps(head.as_dict())) + 2
        if cost > budget_bytes:
            misses += 1
            continue
        misses, budget_bytes = 0, budget_bytes - cost
        packed[head.step, head.group] = text
    for head in heads:  # back in the order of the files
        if (head.step, head.group) in packed:
            chosen.heads.setdefault(head.step, []).append(head)
            chosen.packed.setdefault(head.step, []).append(packed[head.step, head.group])
    return chosen


def _look_at(run: Path, chosen: Chosen) -> Iterator[GroupHead]:
    """Heads of all groups; of a run too large to read, of steps spread evenly over it."""
    room, taken = READ_LIMIT_BYTES, []
    for step in spread(rollout_steps(run)):
        room -= rollouts_path(run, step).stat().st_size
        if room < 0:
            chosen.unread_steps.append(step)
        else:
            taken.append(step)
    for step in sorted(taken):
        yield from index_step(run, step)


def _in_turn(heads: list[GroupHead]) -> Iterator[GroupHead]:
    """One of each order in turn, none twice."""
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


def as_json(value: Any) -> str:
    """JSON without halves of pairs: valid in JSON, but browsers choke on them."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return _LONE_SURROGATE.sub("\ufffd", text)


def pack(value: Any) -> str:
    """Compressed JSON in characters that mean nothing to HTML."""
    return base64.b64encode(gzip.compress(as_json(value).encode(), 6, mtime=0)).decode()


def unpack(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))
