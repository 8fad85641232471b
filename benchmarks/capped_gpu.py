"""Runs a module like `python -m` as on a GPU with less memory.

    python benchmarks/capped_gpu.py GB PEAK.json shoal grpo …

PyTorch may allocate only GB gigabytes (10^9 bytes), and the device reports this size to the memory plan. The CUDA
context and libraries are not part of the cap. PEAK.json gets the peak of the device memory.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from peak_memory import write_peak


def capped_info(free: int, total: int, cap: int) -> tuple[int, int]:
    """(free, total) of a device of `cap` bytes on which the same bytes are used."""
    return max(0, cap - (total - free)), cap


def cap_device(cap: int) -> None:
    import torch

    real = torch.cuda.mem_get_info
    _, total = real()
    if cap >= total:
        raise SystemExit(f"the device has {total / 1e9:.0f} GB; a cap of {cap / 1e9:.0f} GB has no effect")
    torch.cuda.set_per_process_memory_fraction(cap / total)
    torch.cuda.mem_get_info = lambda device=None: capped_info(*real(device), cap)


if __name__ == "__main__":
    gigabytes, peak_file, process = float(sys.argv[1]), Path(sys.argv[2]), os.getpid()
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path.cwd())  # like python -m: the current folder, not the folder of this script
    cap_device(round(gigabytes * 1e9))
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        write_peak(peak_file, process)
