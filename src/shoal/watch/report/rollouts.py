"""Reads rollouts of a run: an index of one step at a time, single groups by byte offset, and searches over many steps.

Used by the report, the live page and `shoal show`. Partial and damaged lines are skipped. A search starts with the
newest steps, stops at its time limit and returns where to continue. Never writes.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.runs.files import storage
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import EVAL, ROLLOUT_FILES, Split, rollouts_path, stored_rollouts

MAX_TOKENS = 16_384  # per completion; further tokens are counted, not shown
PREVIEW_CHARS = 160
CACHED_FILES = 48
BUDGET_S = 0.5  # per search request
LIMIT = 200  # groups per search request


def number(value: Any) -> float | None:
    """A finite number, or None. metrics.jsonl has NaN and infinities as strings."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


class Head(msgspec.Struct):
    """The fields of a rollout that lists show. Decoding only these is fast."""

    rollout_id: str = ""
    prompt_id: str = ""
    group: str = ""
    env: str = ""
    status: str = ""
    drop_reason: str | None = None
    reward: float | None = None
    advantage: float | None = None
    truncated: bool = False
    prompt: str = ""


@dataclass(slots=True)
class GroupHead:
    """A group in a list, with the places of its lines in the file of the step."""

    step: int
    group: str
    prompt_id: str
    env: str
    preview: str
    path: Path
    drop_reason: str | None = None
    rewards: list[float | None] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    advantages: list[float | None] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # offset and length

    @property
    def mean(self) -> float | None:
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SHOWN}


_SHOWN = ("step", "group", "prompt_id", "env", "preview", "drop_reason", "rewards", "statuses", "advantages")
_decoder = msgspec.json.Decoder(Head)
_cache: OrderedDict[tuple[str, int, int], list[GroupHead]] = OrderedDict()


def rollout_steps(run: Path) -> list[int]:
    """Steps whose rollouts, or those of their evaluation, are stored, in order."""
    return sorted({step for split in ROLLOUT_FILES for step, _ in stored_rollouts(run, split)})


def step_bytes(run: Path, step: int) -> int:
    """The size of the step's files."""
    paths = [rollouts_path(run, step, split) for split in ROLLOUT_FILES]
    return sum(path.stat().st_size for path in paths if path.exists())


def index_step(run: Path, step: int) -> list[GroupHead]:
    """The groups of a step, then those of its evaluation, in the order of the files."""
    return [head for split in ROLLOUT_FILES for head in index_file(run, step, split)]


def index_file(run: Path, step: int, split: Split) -> list[GroupHead]:
    """The groups of one file in its order. The last requested files are cached."""
    path = rollouts_path(run, step, split)
    try:
        stat = path.stat()
    except FileNotFoundError:
        return []
    key = (str(path), stat.st_mtime_ns, stat.st_size)
    if key not in _cache:
        _cache[key] = list(_read_heads(path, step))
        while len(_cache) > CACHED_FILES:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return _cache[key]


def _read_heads(path: Path, step: int) -> Iterator[GroupHead]:
    groups: dict[str, GroupHead] = {}
    with storage(f"read {path}"), path.open("rb") as file:
        offset = 0
        for line in file:
            head = _read_head(line)
            if head is not None:
                name = head.group or head.prompt_id
                if name not in groups:
                    groups[name] = GroupHead(step, name, head.prompt_id, head.env, _preview(head.prompt), path)
                _add(groups[name], head, (offset, len(line)))
            offset += len(line)
    yield from groups.values()


def _read_head(line: bytes) -> Head | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:  # lone surrogates or fields of other types: json accepts more than msgspec
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    head = Head(drop_reason=record.get("drop_reason"), truncated=bool(record.get("truncated")))
    for name in ("rollout_id", "prompt_id", "group", "env", "status", "prompt"):
        setattr(head, name, str(record.get(name) or ""))
    head.reward, head.advantage = number(record.get("reward")), number(record.get("advantage"))
    return head


def _add(group: GroupHead, head: Head, place: tuple[int, int]) -> None:
    group.rewards.append(number(head.reward))
    group.statuses.append("truncated" if head.truncated and head.status == "ok" else head.status)
    group.advantages.append(number(head.advantage))
    group.places.append(place)
    group.drop_reason = group.drop_reason or head.drop_reason


def _preview(prompt: str) -> str:
    """The last line of the prompt, which usually contains the question."""
    lines = [line.strip() for line in prompt.strip().splitlines() if line.strip()]
    return lines[-1][-PREVIEW_CHARS:] if lines else ""


def read_group(run: Path, head: GroupHead) -> dict[str, Any]:
    """One group with all its data."""
    records = []
    with storage(f"read {head.path}"), head.path.open("rb") as file:
        for offset, length in head.places:
            file.seek(offset)
            records.append(json.loads(file.read(length)))
    return describe_group(head.group, records)


def collect_rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """All groups of one step with all their data, in the order of the file."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in (line for split in ROLLOUT_FILES for line in read_lines(rollouts_path(run, step, split))):
        groups.setdefault(str(record.get("group") or record.get("prompt_id") or ""), []).append(record)
    return [describe_group(name, records) for name, records in groups.items()]


def describe_group(name: str, records: list[Mapping[str, Any]]) -> dict[str, Any]:
    first, prompt = records[0], records[0].get("prompt")
    return {
        "group": name,
        "prompt_id": str(first.get("prompt_id", "")),
        "env": str(first.get("env", "")),
        "prompt": prompt if isinstance(prompt, str) else "",
        "drop_reason": next((reason for record in records if (reason := record.get("drop_reason"))), None),
        "messages": next((found for record in records if (found := _messages(record.get("prompt_messages")))), []),
        "rollouts": [_describe_rollout(record) for record in records],
    }


def _describe_rollout(record: Mapping[str, Any]) -> dict[str, Any]:
    completion, error = record.get("completion"), record.get("error")
    parts = record.get("parts") or {}
    return {
        "id": str(record.get("rollout_id", "")),
        "status": str(record.get("status", "")),
        "error": str(error) if error else None,
        "truncated": bool(record.get("truncated")),
        "reward": number(record.get("reward")),
        "parts": {str(name): number(value) for name, value in parts.items()},
        "advantage": number(record.get("advantage")),
        "completion": completion if isinstance(completion, str) else "",
        "messages": _messages(record.get("messages")),
        "turn_tokens": _turn_tokens(record),
        "turn_rewards": [number(reward) for reward in record.get("turn_rewards") or []],
        "spans": record.get("spans") or [],
        "tokens": _describe_tokens(record),
    }


def _messages(stored: Any) -> list[dict[str, Any]]:
    """The messages of a conversation; empty for a prompt or a completion of plain text."""
    return [
        {**{key: str(value) for key, value in message.items() if key != "tool_calls"},
         "tool_calls": [{key: str(value) for key, value in call.items()} for call in message.get("tool_calls", [])]}
        for message in stored or []
    ]  # fmt: skip


def _describe_tokens(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tokens of the completion as columns. The stored arrays may start with the prompt, which has mask 0."""
    texts = record.get("token_texts")
    if not texts:
        return None
    mask = [bool(value) for value in record.get("loss_mask") or [True] * len(texts)]
    start = mask.index(True) if True in mask else 0
    end = min(len(texts), start + MAX_TOKENS)
    sampler, policy = record.get("sampler_logprobs"), record.get("policy_logprobs")
    return {
        "text": texts[start:end],
        "mask": [int(value) for value in mask[start:end]],
        "sampler": _rounded(sampler, len(texts), start, end),
        "policy": _rounded(policy, len(texts), start, end),
        "advantages": _token_advantages(record, mask, start, end),
        "left_out": len(texts) - end,
        "count": sum(mask),
    }


def _turn_tokens(record: Mapping[str, Any]) -> list[int]:
    """The sampled tokens per turn. A rollout of one turn does not store them."""
    return [int(size) for size in record.get("turn_tokens") or [sum(map(bool, record.get("loss_mask") or []))]]


def _token_advantages(record: Mapping[str, Any], mask: list[bool], start: int, end: int) -> list[float | None] | None:
    """One per token, if they differ within the rollout. A turn with one value has it for all of its tokens."""
    stored, sizes = record.get("token_advantages") or [], _turn_tokens(record)
    if len(stored) != len(sizes):
        return None
    sampled = [
        value for turn, size in zip(stored, sizes, strict=True) for value in (turn * size if len(turn) == 1 else turn)
    ]
    if len(sampled) != sum(mask):  # some turns are not trained, or tokens of the environment are
        return None
    values = iter(sampled)
    return [next(values) if own else None for own in mask][start:end]


def _rounded(values: list[float | None] | None, length: int, start: int, end: int) -> list[float | None] | None:
    if not values or len(values) != length:
        return None
    return [None if value is None else round(value, 4) for value in values[start:end]]


@dataclass(frozen=True, slots=True)
class Query:
    """A filter for groups. Status, reward and text must match at least one rollout of the group."""

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
class SearchHit:
    heads: list[GroupHead]
    next_before: int | None  # continue below this step; None: all steps were searched

    def as_dict(self) -> dict[str, Any]:
        return {"heads": [head.as_dict() for head in self.heads], "next": self.next_before}


def find(run: Path, query: Query, before: int | None = None) -> SearchHit:
    """Groups that match the query, newest step first."""

    def matching(step: int) -> list[GroupHead]:
        heads = [head for head in index_step(run, step) if query.allows(head)]
        return [head for head in heads if _has_text(run, head, query.text)] if query.text else heads

    return _search_steps(rollout_steps(run), before, matching)


def follow(run: Path, prompt_id: str, steps: Sequence[int], before: int | None = None) -> SearchHit:
    """The groups of one prompt. `steps` are the steps to search, from the journal."""
    return _search_steps(
        steps, before, lambda step: [head for head in index_step(run, step) if head.prompt_id == prompt_id]
    )


def _search_steps(steps: Sequence[int], before: int | None, matching: Callable[[int], list[GroupHead]]) -> SearchHit:
    """Search at least one step, then until the time limit; four times as long if nothing was found."""
    started = time.monotonic()
    heads: list[GroupHead] = []
    for count, step in enumerate(sorted((step for step in steps if before is None or step < before), reverse=True)):
        spent = time.monotonic() - started
        if count and (len(heads) >= LIMIT or spent > BUDGET_S * (1 if heads else 4)):
            return SearchHit(heads, step + 1)
        heads += matching(step)
    return SearchHit(heads, None)


def _has_text(run: Path, head: GroupHead, text: str) -> bool:
    wanted, path = text.casefold(), head.path
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
    replayed: list[str] = []  # groups of earlier steps: their rollouts are stored with those steps
    dropped: dict[str, str | None] = {}


_journal_line = msgspec.json.Decoder(_JournalLine)


class PromptSteps:
    """The steps of each prompt, from the journal. New lines are read as the journal grows."""

    def __init__(self, run: Path) -> None:
        self._run, self._path = run, run / "journal.jsonl"
        self._read = 0  # bytes
        self._steps: dict[str, set[int]] = {}

    def of(self, prompt_id: str) -> list[int]:
        if prompt_id.startswith(EVAL):
            return [step for step, _ in stored_rollouts(self._run, "eval")]
        self._catch_up()
        return sorted(self._steps.get(prompt_id, ()))

    def _catch_up(self) -> None:
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._read:  # a resume has cut the journal
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
                replayed = set(record.replayed)
                for name in {
                    *(_prompt_of(i, 3) for i in record.rollout_ids if i.rpartition("/")[0] not in replayed),
                    *(_prompt_of(g, 2) for g in record.dropped),
                }:
                    self._steps.setdefault(name, set()).add(record.step)


def _prompt_of(name: str, counters: int) -> str:
    """env/index from env/index/epoch/attempt[/position]. The name of the environment may contain slashes."""
    return name.rsplit("/", counters)[0]
