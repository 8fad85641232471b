"""Reads a run directory into plain JSON-able values for the report and the live page. Never writes.

Everything is read as it may be found while a run goes on or after it was killed: missing files are empty, torn lines
are passed over. Rollouts are read by rollouts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, StorageError
from shoal.observability.catalogue import find_metric, sort_metrics
from shoal.observability.health import diagnose
from shoal.observability.journal import read_lines
from shoal.observability.lock import find_holder
from shoal.observability.run_dir import is_used, read_status
from shoal.report.numbers import number
from shoal.report.rollouts import rollout_steps
from shoal.report.settings import config_changes

MAX_EVENTS = 2000
_STATUS_KEYS = ("state", "step", "reason", "created_at", "updated_at", "next_command")


def require_run(run: Path) -> Path:
    """Refuse what is no run directory, naming what was given."""
    if not run.is_dir():
        raise ConfigError(f"command line: {run}: is not a folder; name a run directory")
    if not is_used(run):
        raise ConfigError(f"command line: {run}: is not a run directory (it has no status.json); name one that a run wrote")
    return run


def collect_overview(run: Path) -> dict[str, Any]:
    """Everything but the rollouts: status, metrics by column, findings, configuration, events."""
    require_run(run)
    events = list(read_lines(run / "events.jsonl"))
    changes = config_changes(run)
    return {
        "run": describe_run(run),
        **collect_series(read_lines(run / "metrics.jsonl")),
        "config": _read_text(run / "config.yaml"),
        "config_changes": changes,
        "findings": [finding.as_dict() for finding in diagnose(run)],
        "events": events[-MAX_EVENTS:],
        "events_left_out": max(0, len(events) - MAX_EVENTS),
        "rollout_steps": rollout_steps(run),
    }


def collect_series(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of metrics.jsonl as columns: steps, and for each metric a value or None a step."""
    by_step = {int(record["step"]): record for record in records if isinstance(record.get("step"), int)}
    steps = sorted(by_step)
    names = sort_metrics({name: 0.0 for record in by_step.values() for name in record if name != "step"})
    return {"steps": steps, "series": {name: [number(by_step[step].get(name)) for step in steps] for name in names}}


def describe_run(run: Path) -> dict[str, Any]:
    status = read_status(run)
    told = {key: status.get(key) for key in _STATUS_KEYS}
    if told["state"] == "running" and find_holder(run) is None:
        told["state"] = "killed"  # a run that ends by itself says so; nobody holds this one any more
    return {"name": run.resolve().name, "path": str(run), **told}


def name_apart(overviews: Sequence[dict[str, Any]]) -> None:
    """Runs of the same folder name are told apart by the folders above it."""
    names = [overview["run"]["name"] for overview in overviews]
    for overview in overviews:
        if names.count(overview["run"]["name"]) > 1:
            overview["run"]["name"] = "/".join(Path(overview["run"]["path"]).resolve().parts[-2:])


def glossary_of(overviews: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """The catalogue's words on every metric that occurs."""
    return {name: _describe_metric(name) for overview in overviews for name in overview["series"]}


def _describe_metric(name: str) -> dict[str, str]:
    metric = find_metric(name)
    if metric is None:
        return {"meaning": "", "unit": "", "healthy": "", "change": ""}
    return {"meaning": metric.meaning, "unit": metric.unit, "healthy": metric.healthy, "change": metric.change}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror}") from error
