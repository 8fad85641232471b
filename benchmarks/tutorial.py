"""Records a run of docs/tutorial.md: python benchmarks/tutorial.py RUN benchmarks/results/tutorial_cpu.json [NOTE]

The page has the files and commands. Its figures are those of the recorded run, which a test compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from machine import machine

STEP_KEYS = ("step", "reward/mean", "group/mixed_frac", "completion/length_mean", "policy/entropy", "time/step")
HELD_OUT = "eval/orders.py-Orders/mean"


def record(run: Path, note: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = {line["step"]: {} for line in lines}
    for line in lines:
        steps[line["step"]] |= line
    measured = [step for number, step in sorted(steps.items()) if number > 0]
    return {
        "machine": machine(),
        "note": note,
        "command": "shoal grpo orders.yaml",
        "held_out": [line[HELD_OUT] for line in lines if HELD_OUT in line],
        "seconds": sum(step["time/step"] for step in measured),
        "steps": [{key: step[key] for key in STEP_KEYS if key in step} for step in measured],
    }


if __name__ == "__main__":
    run, out, *note = sys.argv[1:]
    Path(out).write_text(json.dumps(record(Path(run), " ".join(note)), indent=1) + "\n", "utf-8")
