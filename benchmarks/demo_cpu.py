"""Runs `shoal demo` for seeds 1, 2 and 3, and records the improvement by GRPO and the time.

python benchmarks/demo_cpu.py [SEED ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import write_result

from shoal.demo import held_out
from shoal.runs.run_dir import read_metrics

RESULT = Path(__file__).parent / "results" / "demo_cpu.json"


def run_seed(seed: int) -> dict[str, Any]:
    """One demo in a new folder. `load_before` is the load of the machine before it."""
    with tempfile.TemporaryDirectory() as name:
        folder, load = Path(name) / "demo", os.getloadavg()[0]
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "shoal", "demo", "--dir", str(folder), "--seed", str(seed)], check=True)
        seconds = time.monotonic() - start
        before, after = held_out(folder / "grpo")
        return {
            "before": round(before, 4),
            "after": round(after, 4),
            "lift": round(after - before, 4),
            "seconds": round(seconds, 1),
            "sft_steps_seconds": step_seconds(folder / "sft"),
            "grpo_steps_seconds": step_seconds(folder / "grpo"),
            "load_before": round(load, 2),
            "curve": {m["step"]: round(m[key], 4) for m in read_metrics(folder / "grpo") for key in m if is_mean(key)},
        }


def step_seconds(run: Path) -> float:
    return round(sum(line.get("time/step", 0.0) for line in read_metrics(run)), 1)


def is_mean(name: str) -> bool:
    return name == "eval/reverse-text/mean"


if __name__ == "__main__":
    seeds = [int(word) for word in sys.argv[1:]] or [1, 2, 3]
    runs = {str(seed): run_seed(seed) for seed in seeds}
    write_result(RESULT, {"command": "shoal demo --seed SEED", "seeds": runs})
