"""The configuration of a run as people ask for it: the keys that make it what it is, each beside its default.

A key that follows from others when it is left out (a length named in three places, say) is not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from shoal.config.base import Section
from shoal.config.load import load_run, load_sft
from shoal.config.resolve import as_data, difference, resolve_run, resolve_sft
from shoal.config.schema import RunConfig, SftConfig
from shoal.errors import ShoalError
from shoal.observability.health import read_config

Change = dict[str, Any]  # key, value, default
# Mirrors of what another section says go first, so that the key people write is the one that stays.
_ORDER = {"infer": 0, "orch": 1}


def config_changes(run: Path) -> list[Change] | None:
    """What differs from the defaults; None if config.yaml is not there or not one of this version."""
    data = read_config(run)
    try:
        if "orch" in data:
            return _changes(
                load_run(str(run / "config.yaml")).config, RunConfig, resolve_run, {"env": data["orch"]["env"]}
            )
        return _changes(load_sft(str(run / "config.yaml")).config, SftConfig, resolve_sft, None)
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
    """The keys that cannot be left out without changing the run."""
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
