"""What the name of a model refers to: a shape, a local folder, a GGUF file or a hub id. Nothing is loaded.

The rules refuse a missing path before anything starts, and models/tokenizer.py before it requests a file from the hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.config.fields import nearest
from shoal.config.model_shapes import shape_of, shape_problem
from shoal.config.problems import show

GGUF = ".gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z")


def model_problem(model: str) -> tuple[str, str] | None:
    """(problem, remedy) if there is no such local model or shape, else None."""
    if (shape := shape_of(model)) is not None:
        return shape_problem(shape)
    path = expanded(model)
    if not _exists(path):
        return missing_path(model)
    if path.is_file():
        what = f"{show(model)} is a file without the suffix {GGUF}"
        return None if path.suffix == GGUF else (what, "use the model folder")
    return _folder_problem(model, path)


def missing_path(model: str) -> tuple[str, str] | None:
    """(problem, remedy) if `model` is a path and nothing exists there, else None."""
    if _may_be_hub_id(model) or _exists(expanded(model)):
        return None
    return f"{show(model)} does not exist", similar_path(model) or (
        "check the path; `shoal make-model tiny DIR` builds a small model"
    )


def similar_path(text: str) -> str | None:
    """The existing path that `text` most likely means, as the remedy of a message; None without a similar name.

    Each component that does not exist is replaced by its nearest neighbour in the folder. If only the first components
    can be followed, the message names that folder.
    """
    found = Path(expanded(text).anchor)
    for part in expanded(text).relative_to(found).parts:
        entry = part if _exists(found / part) else nearest(part, _models_in(found))
        if entry is None:
            return f"the nearest existing folder is {_path(found)}" if found.name else None
        found = found / entry
    return f"did you mean {_path(found)}?"


def _folder_problem(model: str, folder: Path) -> tuple[str, str] | None:
    if (folder / "config.json").is_file():
        return None
    what = f"{show(model)} is a run directory, not a model"
    if (folder / "final" / "adapter_config.json").is_file():
        return what, f"use its base model, with train.lora=true and train.adapter_path={folder / 'final'}"
    if (folder / "final").is_dir():
        return what, f"use its weights: {_path(folder / 'final')}"
    return f"{show(model)} is a folder without config.json", "use a folder written by save_pretrained, or a .gguf file"


def _may_be_hub_id(model: str) -> bool:
    """False for a path, also for owner/name if there is a local folder called owner."""
    in_folder = "/" in model and Path(model.split("/")[0]).is_dir()
    return bool(_HUB_ID.match(model)) and not model.endswith(GGUF) and not in_folder


def _path(path: Path) -> str:
    """Not shortened, so that it can be copied."""
    return show(str(path), limit=4096)


def expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of an unknown user
        return Path(text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no access, or a name that is too long
        return False


def _models_in(folder: Path) -> list[str]:
    """Names of the subfolders and GGUF files of a folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix == GGUF or entry.is_dir())
    except OSError:
        return []
