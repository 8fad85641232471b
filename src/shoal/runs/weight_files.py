"""Weights on disk. `find_weights` resolves the name of a model, adapter, run directory or checkpoint to weight files.

`describe`, `verify` and `version_hash` handle the manifest of a published weight version: the trainer writes a folder
and describes it, an engine verifies the files before it replaces a tensor. Reads files only; loads nothing.
Called by `shoal eval`, `shoal export`, the weight channels and the server.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from shoal.config.model_names import expanded
from shoal.core.errors import ConfigError, StorageError
from shoal.runs.checkpoints import CheckpointStore
from shoal.runs.files import digest_files

Kind = Literal["full", "lora"]
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ADAPTER_FILE = "adapter_config.json"
TEMPLATE_FILE = "chat_template.jinja"  # beside it, if the base model has another chat template or none


@dataclass(frozen=True)
class Weights:
    """The name of a model for the loader, and an adapter to apply to it."""

    model: str
    adapter: str | None = None
    run: Path | None = None  # the run directory of these weights


def template_of(adapter: Path | str | None) -> str | None:
    """The chat template that an adapter was trained with, if it is not that of the base model."""
    file = None if adapter is None else Path(adapter).expanduser() / TEMPLATE_FILE
    return str(file) if file is not None and file.is_file() else None


def find_weights(name: str, *, adapter: str | None = None, checkpoint: str | None = None) -> Weights:
    """`checkpoint` selects one of a run directory: a step, `best`, `newest` or `final` (the default if it exists)."""
    path = expanded(name)
    if adapter is not None:
        if checkpoint is not None:
            raise ConfigError("command line: --checkpoint: cannot be combined with --adapter; remove one of them")
        if not (Path(adapter).expanduser() / ADAPTER_FILE).is_file():
            raise ConfigError(
                f"command line: --adapter: {adapter!r} has no {ADAPTER_FILE}; name an adapter folder in PEFT format"
            )
        return Weights(name, adapter)
    if is_run(path):
        return _of_run(path, checkpoint)
    if checkpoint is not None:
        raise ConfigError(f"command line: --checkpoint: {name!r} is not a run directory, so it has no checkpoints")
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
        raise ConfigError(f"command line: {run}: has no {'final' if checkpoint == 'final' else 'checkpoint'} yet")
    wanted = {None: steps[-1], "newest": steps[-1], "best": store.best()}
    step = wanted[checkpoint] if checkpoint in wanted else _step(checkpoint)
    if step is None:
        raise ConfigError(
            "command line: --checkpoint best: this run has no best checkpoint; set orch.eval.keep_best for training"
        )
    if step not in steps:
        kept = ", ".join(map(str, steps))
        raise ConfigError(f"command line: --checkpoint: there is no checkpoint of step {checkpoint}; available: {kept}")
    return _of_folder(store.path(step) / "weights", run)


def _step(text: str | None) -> int:
    if text is None or not text.isdigit():
        raise ConfigError(f"command line: --checkpoint: {text!r} is not a step, final, newest or best")
    return int(text)


def _of_folder(folder: Path, run: Path | None) -> Weights:
    """Full weights or an adapter. The base of an adapter is the model of the run, else that in adapter_config.json."""
    if not (folder / ADAPTER_FILE).is_file():
        return Weights(str(folder), None, run)
    base = _trained_model(run) if run is not None else None
    base = base or _read(folder / ADAPTER_FILE).get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"command line: {folder}: does not name its base model; pass the model, and this folder as --adapter"
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


def describe(folder: Path, version: int, kind: Kind) -> dict[str, Any]:
    """The manifest of a finished folder. It lists the files of the folder itself, not of subfolders."""
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "manifest.json"]
    digests = digest_files(found)
    files = {
        path.name: {"bytes": path.stat().st_size, "digest": digest} for path, digest in zip(found, digests, strict=True)
    }
    about = {"version": version, "kind": kind, "transport": "filesystem"}
    return {**about, "path": str(folder.resolve()), "files": files}


def verify(manifest: Mapping[str, Any]) -> str:
    """Compare every file with its size and checksum; return the hash of the version."""
    folder, files = Path(str(manifest["path"])), manifest.get("files")
    if not isinstance(files, Mapping) or not files:
        raise StorageError(f"weights {folder}: the manifest lists no files, so nothing can be verified")
    for name, expected in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise StorageError(f"weights {folder}: {name!r} is not a file name")
        _check(folder / name, expected)
    return version_hash(manifest)


def version_hash(manifest: Mapping[str, Any]) -> str:
    """blake2b over the version and the hashes of its files or tensors, sorted by name."""
    hashes = {name: about["digest"] for name, about in manifest.get("files", {}).items()}
    hashes |= {tensor["name"]: tensor["digest"] for tensor in manifest.get("tensors", ())}
    digest = hashlib.blake2b(str(int(manifest["version"])).encode(), digest_size=16)
    for name in sorted(hashes):
        digest.update(f"\n{name} {hashes[name]}".encode())
    return digest.hexdigest()


def _check(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != int(expected["bytes"]):
            raise StorageError(f"weights {path}: {size} bytes, but the manifest lists {expected['bytes']}")
        if digest_files([path]) != [expected["digest"]]:
            raise StorageError(f"weights {path}: the content differs from the manifest (wrong checksum)")
    except OSError as error:
        raise StorageError(f"weights {path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"weights {path}: the manifest entry needs bytes and digest") from error
