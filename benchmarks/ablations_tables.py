"""Statistics and tables of the recorded ablations, for the page of results.

The main figure of a run is the mean of its held-out rewards after the start: it uses four times the rollouts of the
last evaluation, and a run that learns earlier has a higher mean. Arms are compared with the base run of the same seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from performance_tables import table

BASE = "base"
SAME = "sampling seed"  # the group of arms with the configuration of the base run
# Groups that are compared with another arm than the base run.
OWN_BASE = {"loss, 8 updates per step": "masked, 8 updates"}
THRESHOLD = 0.25
# Two-sided 95 % quantiles of Student's t distribution, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
Run = dict[str, Any]


class Interval(NamedTuple):
    mean: float
    half: float  # of the 95 % interval; infinite for one value

    @property
    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half


class Row(NamedTuple):
    group: str
    name: str
    runs: list[Run]  # by seed
    difference: Interval | None  # to the base run, paired by seed


def interval(values: Sequence[float]) -> Interval:
    if len(values) < 2:
        return Interval(values[0], math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.mean(values), T95[len(values) - 1] * error)


def after_start(run: Run) -> float:
    return statistics.mean(value for step, value in run["held_out"].items() if int(step) > 0)


def last(run: Run) -> float:
    return run["held_out"][max(run["held_out"], key=int)]


def steps_to_threshold(run: Run) -> int | None:
    return next((int(step) for step, value in run["held_out"].items() if value >= THRESHOLD), None)


def rows(result: dict[str, Any]) -> list[Row]:
    """In the order of the configuration of the arms."""
    runs = {(run["arm"], run["seed"]): run for run in result["runs"] if "error" not in run}
    seeds = sorted({seed for _, seed in runs})
    found = []
    for group, arms in {BASE: {BASE: []}, **result["arms"]}.items():
        own = OWN_BASE.get(group, BASE)
        for name in arms:
            base = BASE if name == own else own
            mine = [runs[name, seed] for seed in seeds if (name, seed) in runs]
            pairs = [(run, runs[base, run["seed"]]) for run in mine if (base, run["seed"]) in runs]
            gains = [after_start(run) - after_start(other) for run, other in pairs]
            if mine:
                found.append(Row(group, name, mine, interval(gains) if gains and name != base else None))
    return found


HEADS = (
    "group", "arm", "last evaluation", "mean of the evaluations", "difference to base",
    f"steps to {THRESHOLD:g}", "rollouts per step", "CPU seconds",
)  # fmt: skip


def arms_table(found: Sequence[Row]) -> str:
    lines = []
    for group in dict.fromkeys(row.group for row in found):
        mine = [row for row in found if row.group == group]
        lines += [["" if n else group, *_cells(row)] for n, row in enumerate(mine)]
    return table(HEADS, lines)


def _cells(row: Row) -> list[str]:
    ends = [last(run) for run in row.runs]
    reached = [steps_to_threshold(run) for run in row.runs]
    ends_range = f" ({reward(min(ends))} to {reward(max(ends))})" if len(ends) > 1 else ""
    return [
        row.name if row.name == BASE else f"`{row.name}`",
        reward(statistics.mean(ends)) + ends_range,
        reward(statistics.mean(map(after_start, row.runs))),
        difference(row.difference),
        ", ".join("–" if step is None else str(step) for step in reached),
        f"{statistics.mean(run['rollouts_mean'] for run in row.runs):.0f}",
        f"{statistics.mean(run['cpu_seconds'] for run in row.runs):.1f}",
    ]


def difference(found: Interval | None) -> str:
    if found is None:
        return ""
    text = f"{signed(found.mean)} ± {reward(found.half)}" if math.isfinite(found.half) else signed(found.mean)
    return f"**{text}**" if found.excludes_zero else text


def reward(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def signed(value: float) -> str:
    return ("+" if value >= 0 else "-") + reward(abs(value))
