"""Finds groups over many steps within a time budget: by environment, status, reward and text, or one prompt's own.

Every call looks at the newest steps first and says where it stopped, so that a page can go on from there and nobody
waits for a whole run to be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.observability.atomic import storage
from shoal.observability.run_dir import rollouts_path
from shoal.report.rollouts import GroupHead, index_step, rollout_steps

BUDGET_S = 0.5
LIMIT = 200


@dataclass(frozen=True, slots=True)
class Query:
    """What a group must have; at least one of its rollouts for status, reward and text."""

    env: str = ""
    status: str = ""  # ok, truncated, error, timeout, excluded; or dropped, mixed
    least: float | None = None
    most: float | None = None
    text: str = ""

    def allows(self, head: GroupHead) -> bool:
        if self.env and head.env != self.env:
            return False
        if self.status and not self._allows_status(head):
            return False
        if self.least is None and self.most is None:
            return True
        low, high = self.least if self.least is not None else -1e300, self.most if self.most is not None else 1e300
        return any(reward is not None and low <= reward <= high for reward in head.rewards)

    def _allows_status(self, head: GroupHead) -> bool:
        if self.status == "dropped":
            return head.drop_reason is not None
        if self.status == "mixed":
            return len({reward for reward in head.rewards if reward is not None}) > 1
        return self.status in head.statuses


class _Texts(msgspec.Struct):
    prompt: str = ""
    completion: str = ""


_texts = msgspec.json.Decoder(_Texts)


@dataclass(slots=True)
class Found:
    heads: list[GroupHead]
    next_before: int | None  # go on below this step; None: everything was looked at

    def as_dict(self) -> dict[str, Any]:
        return {"heads": [head.as_dict() for head in self.heads], "next": self.next_before}


def find(run: Path, query: Query, before: int | None = None) -> Found:
    """Groups that the query allows, newest step first."""

    def matching(step: int) -> list[GroupHead]:
        heads = [head for head in index_step(run, step) if query.allows(head)]
        return [head for head in heads if _has_text(run, head, query.text)] if query.text else heads

    return _sweep(rollout_steps(run), before, matching)


def follow(run: Path, prompt_id: str, steps: Sequence[int], before: int | None = None) -> Found:
    """The groups of one prompt; `steps` are those it may be in, from the journal."""
    return _sweep(steps, before, lambda step: [head for head in index_step(run, step) if head.prompt_id == prompt_id])


def _sweep(steps: Sequence[int], before: int | None, matching: Callable[[int], list[GroupHead]]) -> Found:
    """At least one step, then for as long as the budget lasts; longer while nothing was found."""
    started = time.monotonic()
    heads: list[GroupHead] = []
    for count, step in enumerate(sorted((step for step in steps if before is None or step < before), reverse=True)):
        spent = time.monotonic() - started
        if count and (len(heads) >= LIMIT or spent > BUDGET_S * (1 if heads else 4)):
            return Found(heads, step + 1)
        heads += matching(step)
    return Found(heads, None)


def _has_text(run: Path, head: GroupHead, text: str) -> bool:
    wanted, path = text.casefold(), rollouts_path(run, head.step)
    with storage(f"read {path}"), path.open("rb") as file:
        for offset, length in head.places:
            file.seek(offset)
            try:
                texts = _texts.decode(file.read(length))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if wanted in texts.prompt.casefold() or wanted in texts.completion.casefold():
                return True
    return False


class _JournalLine(msgspec.Struct):
    step: int
    rollout_ids: list[str] = []
    dropped: dict[str, str | None] = {}


_journal_line = msgspec.json.Decoder(_JournalLine)


class PromptSteps:
    """In which steps a prompt was answered, from the journal; read on as it grows."""

    def __init__(self, run: Path) -> None:
        self._path = run / "journal.jsonl"
        self._read = 0  # bytes
        self._steps: dict[str, set[int]] = {}

    def of(self, prompt_id: str) -> list[int]:
        self._catch_up()
        return sorted(self._steps.get(prompt_id, ()))

    def _catch_up(self) -> None:
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._read:  # a resumed run was cut back
            self._read, self._steps = 0, {}
        with storage(f"read {self._path}"), self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                try:
                    record = _journal_line.decode(line)
                except msgspec.DecodeError:
                    continue
                for name in {
                    *(_prompt_of(i, 3) for i in record.rollout_ids),
                    *(_prompt_of(g, 2) for g in record.dropped),
                }:
                    self._steps.setdefault(name, set()).add(record.step)


def _prompt_of(name: str, counters: int) -> str:
    """env/index from env/index/epoch/attempt[/position]; the environment's own name may hold slashes."""
    return name.rsplit("/", counters)[0]
