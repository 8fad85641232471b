"""What a result was measured on: machine and versions, for the JSON files in benchmarks/results/."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
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


def write_result(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n", "utf-8")
