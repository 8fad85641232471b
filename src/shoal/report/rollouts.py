"""Reads rollouts without loading them all: a light index of one step at a time, and single groups by byte offset.

Used by the report, the live page and `shoal show`. Files are read as they may be found while a run goes on: torn and
damaged lines are passed over. Never writes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.observability.atomic import storage
from shoal.observability.journal import read_lines
from shoal.observability.run_dir import rollouts_path
from shoal.report.numbers import number

MAX_TOKENS = 16_384  # of one completion; the rest is counted, not shown
PREVIEW_CHARS = 160
CACHED_STEPS = 24


class Head(msgspec.Struct):
    """What a list of rollouts shows of one; the rest of its line is skipped over, which is what makes this fast."""

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
    """A group in a list, and where its lines are in the file of its step."""

    step: int
    group: str
    prompt_id: str
    env: str
    preview: str
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
    """Steps whose rollouts are stored, in order."""
    stems = [path.stem.removeprefix("step_") for path in (run / "rollouts").glob("step_*.jsonl")]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def index_step(run: Path, step: int) -> list[GroupHead]:
    """The groups of a step in the order of the file. The newest asked-for steps are kept in memory."""
    path = rollouts_path(run, step)
    try:
        told = path.stat()
    except FileNotFoundError:
        return []
    key = (str(path), told.st_mtime_ns, told.st_size)
    if key not in _cache:
        _cache[key] = list(_read_heads(path, step))
        while len(_cache) > CACHED_STEPS:
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
                    groups[name] = GroupHead(step, name, head.prompt_id, head.env, _preview(head.prompt))
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
    try:  # lone surrogates, or fields of other types: the tolerant reader decides
        record = json.loads(line)
    except ValueError:
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
    """The end of the prompt, where the question is."""
    lines = [line.strip() for line in prompt.strip().splitlines() if line.strip()]
    return lines[-1][-PREVIEW_CHARS:] if lines else ""


def read_group(run: Path, head: GroupHead) -> dict[str, Any]:
    """One group in full."""
    path = rollouts_path(run, head.step)
    records = []
    with storage(f"read {path}"), path.open("rb") as file:
        for offset, length in head.places:
            file.seek(offset)
            records.append(json.loads(file.read(length)))
    return describe_group(head.group, records)


def collect_rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """The groups of one step in full, in the order of the file."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in read_lines(rollouts_path(run, step)):
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
        "spans": record.get("spans") or [],
        "tokens": _describe_tokens(record),
    }


def _describe_tokens(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Columns of the completion's tokens. The stored arrays may begin with the prompt, which has mask 0."""
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
        "left_out": len(texts) - end,
        "count": sum(mask),
    }


def _rounded(values: list[float | None] | None, length: int, start: int, end: int) -> list[float | None] | None:
    if not values or len(values) != length:
        return None
    return [None if value is None else round(value, 4) for value in values[start:end]]
