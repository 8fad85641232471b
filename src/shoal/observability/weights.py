"""Which weights a name stands for: a model, an adapter, a run directory or one checkpoint of a run.

Used by `shoal eval` and `shoal export`. Looks at files only; nothing is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.errors import ConfigError
from shoal.observability.checkpoints import CheckpointStore

ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True)
class Weights:
    """A model as the loader names it, and an adapter to put on it."""

    model: str
    adapter: str | None = None
    run: Path | None = None  # the run directory they come from


def find_weights(name: str, *, adapter: str | None = None, checkpoint: str | None = None) -> Weights:
    """`checkpoint` picks one of a run directory: a step, `best`, `newest`, or `final`, the default if there is one."""
    path = Path(name).expanduser()
    if adapter is not None:
        if not (Path(adapter).expanduser() / ADAPTER_FILE).is_file():
            raise ConfigError(f"command line: --adapter: {adapter!r} holds no {ADAPTER_FILE}; name a folder PEFT wrote")
        return Weights(name, adapter)
    if is_run(path):
        return _of_run(path, checkpoint)
    if checkpoint is not None:
        raise ConfigError(f"command line: --checkpoint: {name!r} is not a run directory, so there is nothing to choose")
    if (path / "weights").is_dir() and (path / "manifest.json").is_file():
        return _of_folder(path / "weights", path.parents[1] if is_run(path.parents[1]) else None)
    if (path / ADAPTER_FILE).is_file():
        return _of_folder(path, path.parent if is_run(path.parent) else None)
    return Weights(name)


def is_run(path: Path) -> bool:
    return (path / "status.json").is_file() and (path / "config.yaml").is_file()


def _of_run(run: Path, checkpoint: str | None) -> Weights:
    if checkpoint in (None, "final") and (run / "final").is_dir():
        return _of_folder(run / "final", run)
    store = CheckpointStore(run / "checkpoints", "")
    steps = store.steps()
    if not steps or checkpoint == "final":
        raise ConfigError(f"command line: {run}: holds no {'final' if checkpoint == 'final' else 'checkpoint'} yet")
    wanted = {None: steps[-1], "newest": steps[-1], "best": store.best()}
    step = wanted[checkpoint] if checkpoint in wanted else _step(checkpoint)
    if step is None:
        raise ConfigError("command line: --checkpoint best: this run marked none; set orch.eval.keep_best in training")
    if step not in steps:
        kept = ", ".join(map(str, steps))
        raise ConfigError(f"command line: --checkpoint: there is no step {checkpoint}; kept are {kept}")
    return _of_folder(store.path(step) / "weights", run)


def _step(text: str | None) -> int:
    if text is None or not text.isdigit():
        raise ConfigError(f"command line: --checkpoint: {text!r} is neither a step nor final, newest or best")
    return int(text)


def _of_folder(folder: Path, run: Path | None) -> Weights:
    """A folder of weights, or of an adapter: then its base is the run's model, else the one PEFT wrote down."""
    if not (folder / ADAPTER_FILE).is_file():
        return Weights(str(folder), None, run)
    base = _trained_model(run) if run is not None else None
    base = base or _read(folder / ADAPTER_FILE).get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"command line: {folder}: does not name its base model; give the model, and this as --adapter"
        )
    return Weights(str(base), str(folder), run)


def _trained_model(run: Path) -> str | None:
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8")) or {}
    return (config.get("train") or {}).get("model")


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"command line: {file}: cannot be read as JSON") from None
