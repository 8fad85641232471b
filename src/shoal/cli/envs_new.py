"""`shoal envs new`: a package with an environment, its settings for a run and a test that passes."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from shoal.errors import ConfigError, StorageError

TEMPLATES = "examples_data/environment"
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}\Z")


def scaffold(name: str, folder: Path) -> list[Path]:
    """Writes the package; returns the files. `my-env` is the folder, `my_env` the module, `MyEnv` the class."""
    if not NAME.match(name):
        raise ConfigError(f"command line: {name!r}: a name has small letters, digits and dashes, as my-env")
    words = {"NAME": name, "MODULE": name.replace("-", "_"), "CLASS": "".join(p.capitalize() for p in name.split("-"))}
    if folder.exists():
        raise ConfigError(f"command line: {folder}: exists already; choose another name")
    written = []
    try:
        for template in sorted((files("shoal") / TEMPLATES).iterdir(), key=lambda entry: entry.name):
            path = folder / _filled(template.name.removesuffix(".txt").replace("__", "/"), words)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(template.read_text(encoding="utf-8"), words), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error
    return written


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"%{word}%", value)
    return text
