"""Reads a run directory into plain JSON-able values for the report and the dashboard. Never writes.

Everything is read as it may be found while a run goes on or after it was killed: missing files are empty, torn lines
are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, StorageError
from shoal.observability.journal import read_lines
from shoal.observability.lock import find_holder
from shoal.observability.catalogue import find_metric, sort_metrics
from shoal.observability.run_dir import is_used, read_status, rollouts_path

MAX_EVENTS = 2000
MAX_TOKENS = 16_384  # of one completion; the rest is counted, not shown


def collect_overview(run: Path) -> dict[str, Any]:
    """Everything but the rollouts: status, metrics by column, configuration, events."""
    if not is_used(run):
        raise ConfigError(f"{run} is not a run directory (it has no status.json)")
    events = list(read_lines(run / "events.jsonl"))
    series = collect_series(read_lines(run / "metrics.jsonl"))
    return {
        "run": _describe_run(run),
        **series,
        "catalogue": {name: _describe_metric(name) for name in series["series"]},
        "config": _read_text(run / "config.yaml"),
        "events": events[-MAX_EVENTS:],
        "events_left_out": max(0, len(events) - MAX_EVENTS),
        "rollout_steps": rollout_steps(run),
    }


def collect_series(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of metrics.jsonl as columns: steps, and for each metric a value or None a step."""
    by_step = {int(record["step"]): record for record in records if isinstance(record.get("step"), int)}
    steps = sorted(by_step)
    names = sort_metrics({name: 0.0 for record in by_step.values() for name in record if name != "step"})
    return {"steps": steps, "series": {name: [_number(by_step[step].get(name)) for step in steps] for name in names}}


def rollout_steps(run: Path) -> list[int]:
    """Steps whose rollouts are stored, in order."""
    stems = [path.stem.removeprefix("step_") for path in (run / "rollouts").glob("step_*.jsonl")]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def collect_rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """The groups of one step, in the order of the file, each with its rollouts."""
    groups: dict[str, dict[str, Any]] = {}
    for record in read_lines(rollouts_path(run, step)):
        name = str(record.get("group", record.get("prompt_id", "")))
        group = groups.setdefault(name, _describe_group(name, record))
        group["rollouts"].append(_describe_rollout(record))
        group["drop_reason"] = group["drop_reason"] or record.get("drop_reason")
    return list(groups.values())


def _describe_run(run: Path) -> dict[str, Any]:
    status = read_status(run)
    told = {key: status.get(key) for key in ("state", "step", "reason", "created_at", "updated_at", "next_command")}
    if told["state"] == "running" and find_holder(run) is None:
        told["state"] = "killed"  # a run that ends by itself says so; nobody holds this one any more
    return {"name": run.resolve().name, **told}


def _describe_metric(name: str) -> dict[str, str]:
    metric = find_metric(name)
    if metric is None:
        return {"meaning": "", "unit": "", "healthy": ""}
    return {"meaning": metric.meaning, "unit": metric.unit, "healthy": metric.healthy}


def _describe_group(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    prompt = record.get("prompt")
    return {
        "group": name,
        "prompt_id": str(record.get("prompt_id", "")),
        "env": str(record.get("env", "")),
        "prompt": prompt if isinstance(prompt, str) else "",
        "drop_reason": None,
        "rollouts": [],
    }


def _describe_rollout(record: Mapping[str, Any]) -> dict[str, Any]:
    completion = record.get("completion")
    parts = record.get("parts") or {}
    return {
        "id": str(record.get("rollout_id", "")),
        "status": str(record.get("status", "")),
        "reward": _number(record.get("reward")),
        "parts": {str(name): _number(value) for name, value in parts.items()},
        "advantage": _number(record.get("advantage")),
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


def _number(value: Any) -> float | None:
    """A finite number, or None; metrics spell NaN and infinities out as words."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror}") from error
