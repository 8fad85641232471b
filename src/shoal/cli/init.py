"""`shoal init`: writes the example configurations that come with the package."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from shoal.cli.output import say
from shoal.errors import ConfigError, StorageError

EXAMPLES = "examples_data"


def init(folder: str) -> None:
    """Write the examples into a folder; nothing that exists is overwritten.

    Parameters
    ----------
    folder
        Where to write; made if it does not exist.
    """
    target = Path(folder)
    wanted = {target / name: text for name, text in example_files().items()}
    existing = [path for path in wanted if path.exists()]
    if target.is_file() or existing:
        raise ConfigError(f"command line: {existing[0] if existing else target}: exists already; name another folder")
    try:
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}") from error
    for path in wanted:
        say(str(path))
    grpo = target / "grpo"
    say(f"try: shoal grpo --train {grpo}/train.yaml --infer {grpo}/infer.yaml --orch {grpo}/orch.yaml --dry-run")


def example_files() -> dict[str, str]:
    """Path below the examples folder → text."""
    root = files("shoal") / EXAMPLES
    return {
        path: entry.read_text(encoding="utf-8") for path, entry in _walk(root, "") if path.endswith((".yaml", ".md"))
    }


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        path = f"{prefix}{entry.name}"
        found += _walk(entry, f"{path}/") if entry.is_dir() else [(path, entry)]
    return found
