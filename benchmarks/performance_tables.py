"""Formatting of tables and numbers for the performance page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_of(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    return table([head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def number(value: float) -> str:
    return f"{value:,.0f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def gib(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} GiB"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 10:
        return f"{value:.0f} s"
    return f"{value:.2f} s" if value >= 0.1 else f"{1e3 * value:.2g} ms"
