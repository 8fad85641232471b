"""The machine and the command of a result, for the JSON files in benchmarks/results/."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    for package in ("transformers", "peft", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return found


def wait_until_quiet(limit_s: float, share: float = 0.9, look_s: float = 3.0) -> float:
    """Wait until this share of the CPUs is idle, with a time limit; returns the last idle share."""
    deadline = time.monotonic() + limit_s
    while True:
        before = _cpu_times()
        time.sleep(look_s)
        spent = [now - then for now, then in zip(_cpu_times(), before, strict=True)]
        idle = (spent[3] + spent[4]) / max(1, sum(spent))  # idle and waiting for a disk
        if idle >= share or time.monotonic() > deadline:
            return idle


def _cpu_times() -> list[int]:
    return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def command() -> str:
    """The command line, relative to the root of the repository. Paths of other files are shortened."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Written completely or not at all: benchmarks write after every row and may be interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), "command": command(), **result}, indent=1) + "\n"
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, "utf-8")
    draft.replace(path)


def print_table(title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """A short table for the terminal. The JSON contains everything."""
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    sys.stdout.flush()


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
