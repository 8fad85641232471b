"""Runs a module like `python -m`, and writes the peak of the device memory at the end.

python benchmarks/peak_memory.py PEAK.json shoal grpo …

The run is unchanged: PyTorch records the peak of this process anyway.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path


def write_peak(path: Path, process: int) -> None:
    torch = sys.modules.get("torch")
    if torch is None or os.getpid() != process or not torch.cuda.is_available():
        return
    peak = {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }
    path.write_text(json.dumps(peak), "utf-8")


if __name__ == "__main__":
    peak_file, process = Path(sys.argv[1]), os.getpid()
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path.cwd())  # like python -m: the current folder, not the folder of this script
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        write_peak(peak_file, process)
