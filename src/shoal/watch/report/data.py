"""Reads a run directory into JSON-serialisable data for the report and the live page. Never writes.

It reads runs in any state, also running and killed ones: missing files are empty and partial lines are skipped.
Rollouts are read by rollouts.py. `config_changes` lists the configuration keys that differ from their defaults, without
keys that are derived from others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from shoal.config.load import load_run, load_supervised
from shoal.config.resolve import as_data, difference, resolve_run, resolve_supervised
from shoal.config.schema import DpoConfig, RunConfig, SftConfig
from shoal.core.errors import ConfigError, ShoalError, StorageError
from shoal.core.section import Section
from shoal.runs.files import seems_running, storage
from shoal.runs.journal import decode_line, read_lines
from shoal.runs.run_dir import is_used, read_progress, read_status
from shoal.watch.glossary import SUPERVISED_LOSSES, Metric, find_metric, sort_metrics
from shoal.watch.health import diagnose, read_config
from shoal.watch.health_rules import FIRST_STEPS, SHARE_OF_START
from shoal.watch.report.rollouts import number, rollout_steps

Change = dict[str, Any]  # key, value, default
MAX_EVENTS = 2000
MAX_RUNS, MAX_DEPTH = 1000, 8  # of a list of runs
CURVE_POINTS = 80  # per curve in a list of runs
_STATUS_KEYS = ("state", "step", "reason", "created_at", "updated_at", "next_command")
_NORMAL_REASONS = ("started", "resumed", "checkpoint")  # reasons of a running run that are not worth showing
# Sections with derived keys are tried first, so that the key the user wrote remains.
_ORDER = {"infer": 0, "orch": 1}


def require_run(run: Path) -> Path:
    """Raise ConfigError if `run` is not a run directory."""
    if not run.is_dir():
        raise ConfigError(f"command line: {run}: is not a folder; name a run directory")
    if not is_used(run):
        below = find_runs(run)[:3]
        fix = f"name one of the runs in it: {', '.join(map(str, below))}" if below else "name the output_dir of a run"
        raise ConfigError(f"command line: {run}: is not a run directory (it has no status.json); {fix}")
    return run


def collect_overview(run: Path) -> dict[str, Any]:
    """All data except rollouts: status, metrics by column, findings, configuration, events."""
    require_run(run)
    events = list(read_lines(run / "events.jsonl"))
    changes = config_changes(run)
    return {
        "run": {**describe_run(run), "total_steps": _total_steps(run)},
        "about": {**describe_config(run), **_describe_machine(events)},
        **collect_series(read_lines(run / "metrics.jsonl")),
        "config": _read_text(run / "config.yaml"),
        "config_changes": changes,
        "findings": [finding.as_dict() for finding in diagnose(run)],
        "events": events[-MAX_EVENTS:],
        "events_left_out": max(0, len(events) - MAX_EVENTS),
        "rollout_steps": rollout_steps(run),
    }


def collect_series(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of metrics.jsonl as columns: the steps, and for each metric one value or None per step."""
    by_step = {int(record["step"]): record for record in records if isinstance(record.get("step"), int)}
    steps = sorted(by_step)
    names = sort_metrics({name: 0.0 for record in by_step.values() for name in record if name != "step"})
    return {"steps": steps, "series": {name: [number(by_step[step].get(name)) for step in steps] for name in names}}


def describe_run(run: Path) -> dict[str, Any]:
    status = read_status(run)
    shown = {key: status.get(key) for key in _STATUS_KEYS}
    if shown["state"] == "running":
        if seems_running(run):
            shown["next_command"] = None  # it is running, so there is nothing to continue
            shown["progress"] = read_progress(run)
            if shown["reason"] in _NORMAL_REASONS:
                shown["reason"] = None
        else:
            shown["state"] = "killed"  # a run that ends records it; this one is gone
    return {"name": run.resolve().name, "path": str(run), **shown}


def find_runs(folder: Path) -> list[Path]:
    """The run directories below a folder, by name. Links and hidden folders are not followed."""
    found = []
    for path, folders, files in os.walk(folder):
        if "status.json" in files:
            found.append(Path(path))
            folders.clear()  # a run contains no other
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if len(found) >= MAX_RUNS or len(Path(path).relative_to(folder).parts) >= MAX_DEPTH:
            folders.clear()
    return found


class RunSummary:
    """One row of the list of runs. The metrics are read again only if their file has changed."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._read: tuple[int, int] | None = None  # time and size of metrics.jsonl
        self._about: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        try:
            return {**describe_run(self._run), **self._describe()}
        except ShoalError as error:
            return {"name": self._run.name, "state": "unreadable", "reason": str(error)}

    def _describe(self) -> dict[str, Any]:
        path = self._run / "metrics.jsonl"
        state = (stat.st_mtime_ns, stat.st_size) if path.exists() and (stat := path.stat()) else (0, 0)
        if state != self._read:
            found = collect_series(read_lines(path))
            series = found["series"]
            main = next((name for name in ("reward/mean", *SUPERVISED_LOSSES) if name in series), None)
            held_out = next((name for name in series if name.startswith("eval/") and name.endswith("/mean")), None)
            self._about = {
                "total_steps": _total_steps(self._run),
                "about": describe_config(self._run),
                "metric": main,
                "curve": _downsample(series[main]) if main else [],
                "held_out": [value for value in series[held_out] if value is not None] if held_out else [],
            }
            self._read = state
        return self._about


def _downsample(column: list[float | None]) -> list[float]:
    """The known values, or the means of at most CURVE_POINTS stretches of them. The first and last value are kept."""
    values = [value for value in column if value is not None]
    if len(values) < 2:
        return values
    size = math.ceil(len(values) / CURVE_POINTS)
    stretches = [values[start : start + size] for start in range(0, len(values), size)]
    return values[:1] + [sum(stretch) / len(stretch) for stretch in stretches[1:-1]] + values[-1:]


class MetricsTail:
    """Reads only the new rows of metrics.jsonl. It stores the offset of each step."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._offsets: list[tuple[int, int]] = []  # step and offset, in the order of the file
        self._read_bytes = 0

    def after(self, step: int) -> list[dict[str, Any]] | None:
        """Rows later than `step`; None if the run was cut back to an earlier one."""
        self._catch_up()
        if self._offsets and self._offsets[-1][0] < step:
            return None
        later = [offset for found, offset in self._offsets if found > step]
        return read_from(self._path, later[0]) if later else []

    def _catch_up(self) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._read_bytes:
            self._offsets, self._read_bytes = [], 0
        if size == self._read_bytes:
            return
        with storage(f"read {self._path}"), self._path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                record = decode_line(line)
                if record is not None and isinstance(record.get("step"), int):
                    self._offsets.append((record["step"], self._read_bytes))
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)


def read_from(path: Path, offset: int) -> list[dict[str, Any]]:
    with storage(f"read {path}"), path.open("rb") as file:
        file.seek(offset)
        return [record for line in file if (record := decode_line(line)) is not None]


def make_names_unique(overviews: Sequence[dict[str, Any]]) -> None:
    """Add the parent folder to the names of runs with the same folder name."""
    names = [overview["run"]["name"] for overview in overviews]
    for overview in overviews:
        if names.count(overview["run"]["name"]) > 1:
            overview["run"]["name"] = "/".join(Path(overview["run"]["path"]).resolve().parts[-2:])


def glossary_of(overviews: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Glossary entries of all metrics of the runs."""
    return {name: _describe_metric(name) for overview in overviews for name in overview["series"]}


def _describe_metric(name: str) -> dict[str, Any]:
    """`limits` are the healthy range for the charts; `start_share` is relative to the mean of the first steps."""
    metric = find_metric(name) or Metric(name, "", "")
    limits = metric.limits
    if name in SHARE_OF_START:
        limits |= {"start_share": SHARE_OF_START[name], "start_steps": FIRST_STEPS}
    texts = {"meaning": metric.meaning, "unit": metric.unit, "healthy": metric.healthy, "change": metric.change}
    return {**texts, "limits": limits}


def describe_config(run: Path) -> dict[str, str]:
    """Model, environments, algorithm and learning rate for the header of the page, as far as config.yaml has them."""
    config = read_config(run)
    train, orch = (section if isinstance(section := config.get(name), dict) else {} for name in ("train", "orch"))
    loss, rate, environments = train.get("loss"), train.get("learning_rate"), orch.get("env")
    about = {"Model": str(train.get("model") or "")}
    if isinstance(environments, list):
        named = [env for env in environments if isinstance(env, dict)]
        about["Environments"] = ", ".join(str(env.get("name") or env.get("id") or "") for env in named)
    if "dataset" in config and "orch" not in config:
        about["Algorithm"] = supervised_algorithm(config)
    elif isinstance(loss, dict):
        about["Algorithm"] = str(loss.get("type") or "")
    if isinstance(rate, int | float):
        about["Learning rate"] = f"{rate:g}"
    return {label: text for label, text in about.items() if text}


def _describe_machine(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Device and versions of the newest start, if the run recorded them."""
    recorded = [found for event in events if isinstance(found := (event.get("data") or {}).get("machine"), dict)]
    if not recorded or "device" not in recorded[-1]:
        return {}
    versions = {name: version for name, version in recorded[-1].items() if name != "device"}
    about = {"Device": str(recorded[-1]["device"])}
    return about | {"Versions": ", ".join(f"{name} {version}" for name, version in versions.items())}


def supervised_algorithm(config: Mapping[str, Any]) -> str:
    """The algorithm of a run that does not sample, in words."""
    loss = config.get("loss")
    return f"DPO with the loss {loss.get('type')}" if isinstance(loss, dict) else "supervised fine-tuning"


def _total_steps(run: Path) -> int | None:
    """train.max_steps, or None if the run is planned in epochs."""
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


def config_changes(run: Path) -> list[Change] | None:
    """Keys that differ from the defaults. None if config.yaml is missing or from another version."""
    data = read_config(run)
    try:
        if "orch" in data:
            return _changes(
                load_run(str(run / "config.yaml")).config, RunConfig, resolve_run, {"env": data["orch"]["env"]}
            )
        kind = DpoConfig if "loss" in data else SftConfig
        return _changes(load_supervised(kind, str(run / "config.yaml")).config, kind, resolve_supervised, None)
    except (ShoalError, ValueError, KeyError, TypeError):
        return None


def _changes(
    config: Any, schema: type[Section], resolve: Callable[[Any], Any], orch: dict[str, Any] | None
) -> list[Change]:
    required: dict[str, Any] = {"orch": orch} if orch else {"train": {}, "dataset": as_data(config)["dataset"]}
    plain = resolve(schema.model_validate(required))
    wanted = resolve(config)
    differing = difference(plain, wanted)
    needed = _minimal(as_data(wanted), list(differing), lambda data: as_data(resolve(schema.model_validate(data))))
    changes = [
        {"key": key, "value": now, "default": before} for key, (before, now) in differing.items() if key in needed
    ]
    if orch:
        changes.insert(0, {"key": "orch.env", "value": as_data(wanted)["orch"]["env"], "default": None})
    return changes


def _minimal(target: dict[str, Any], keys: list[str], rebuild: Callable[[dict[str, Any]], Any]) -> set[str]:
    """The keys that cannot be left out without changing the resolved configuration."""
    data, needed = deepcopy(target), set()
    for key in sorted(keys, key=lambda key: _ORDER.get(key.split(".")[0], 2)):
        trial = deepcopy(data)
        if not _remove(trial, key.split(".")):
            continue
        try:
            same = rebuild(trial) == target
        except ValueError:
            same = False
        if same:
            data = trial
        else:
            needed.add(key)
    return needed


def _remove(data: dict[str, Any], path: list[str]) -> bool:
    for part in path[:-1]:
        data = data.get(part)  # type: ignore[assignment]
        if not isinstance(data, dict):
            return False
    return data.pop(path[-1], None) is not None
