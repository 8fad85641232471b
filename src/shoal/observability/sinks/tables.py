"""Completions as rows for trackers that have tables: a few of each step, taken from all of its groups in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

from shoal.types import Rollout, RolloutGroup

COLUMNS = ("step", "env", "prompt", "completion", "reward", "parts", "advantage", "status")


def completion_rows(step: int, groups: Sequence[RolloutGroup], limit: int) -> list[dict[str, Any]]:
    """At most `limit` rows: one rollout of every group, then a second one, and so on."""
    return [_row(step, rollout) for rollout in islice(_in_turn(groups), limit)]


def _in_turn(groups: Sequence[RolloutGroup]) -> Iterator[Rollout]:
    for rollouts in zip_longest(*(group.rollouts for group in groups)):
        yield from (rollout for rollout in rollouts if rollout is not None)


def _row(step: int, rollout: Rollout) -> dict[str, Any]:
    prompt = rollout.prompt
    return {
        "step": step,
        "env": prompt.env,
        "prompt": _text(prompt.messages),
        "completion": _text(rollout.messages[len(prompt.messages) :]),
        "reward": rollout.reward,
        "parts": ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items()),
        "advantage": rollout.advantage,
        "status": rollout.status,
    }


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for viewers that show text; what could act as markup there is escaped."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    for mark, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;"), ("\n", " ⏎ ")):
        text = text.replace(mark, written)
    return text
