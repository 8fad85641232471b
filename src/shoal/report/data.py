"""Reads a run directory into plain JSON-able values for the report and the live page. Never writes.

Everything is read as it may be found while a run goes on or after it was killed: missing files are empty, torn lines
are passed over. Rollouts are read by rollouts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, StorageError
from shoal.observability.atomic import storage
from shoal.observability.catalogue import find_metric, sort_metrics
from shoal.observability.health import diagnose, read_config
from shoal.observability.journal import decode_line, read_lines
from shoal.observability.lock import seems_running
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
        raise ConfigError(
            f"command line: {run}: is not a run directory (it has no status.json); name one that a run wrote"
        )
    return run


def collect_overview(run: Path) -> dict[str, Any]:
    """Everything but the rollouts: status, metrics by column, findings, configuration, events."""
    require_run(run)
    events = list(read_lines(run / "events.jsonl"))
    changes = config_changes(run)
    return {
        "run": {**describe_run(run), "total_steps": _total_steps(run)},
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


_AS_EVER = ("started", "resumed", "checkpoint")  # reasons of a run that waits for nobody


def describe_run(run: Path) -> dict[str, Any]:
    status = read_status(run)
    told = {key: status.get(key) for key in _STATUS_KEYS}
    if told["state"] == "running":
        if seems_running(run):
            told["next_command"] = None  # it goes on by itself
            if told["reason"] in _AS_EVER:
                told["reason"] = None
        else:
            told["state"] = "killed"  # a run that ends by itself says so; nobody holds this one any more
    return {"name": run.resolve().name, "path": str(run), **told}


class MetricsTail:
    """New rows of metrics.jsonl without reading the old ones again: it remembers where each step begins."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._places: list[tuple[int, int]] = []  # step and offset, in the order of the file
        self._read = 0

    def after(self, step: int) -> list[dict[str, Any]] | None:
        """Rows later than `step`; None if the run was cut back to an earlier one."""
        self._catch_up()
        if self._places and self._places[-1][0] < step:
            return None
        later = [offset for found, offset in self._places if found > step]
        return read_from(self._path, later[0]) if later else []

    def _catch_up(self) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._read:
            self._places, self._read = [], 0
        if size == self._read:
            return
        with storage(f"read {self._path}"), self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                record = decode_line(line)
                if record is not None and isinstance(record.get("step"), int):
                    self._places.append((record["step"], self._read))
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)


def read_from(path: Path, offset: int) -> list[dict[str, Any]]:
    with storage(f"read {path}"), path.open("rb") as file:
        file.seek(offset)
        return [record for line in file if (record := decode_line(line)) is not None]


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


def _total_steps(run: Path) -> int | None:
    """Where the run is to end, if its configuration says so in steps."""
    train = read_config(run).get("train")
    steps = train.get("max_steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror}") from error
