"""Compares the speed of two source trees on one machine: the GPU benchmarks of both trees alternate in one run.

python benchmarks/before_after.py OUT.json --before FOLDER [--scripts train rollout grpo_step] [--rounds 2]

FOLDER is a checkout of the other tree with its own benchmarks/. Each row of a benchmark becomes one row here: the
median of the rounds for both trees, and `change`, the share by which this tree is faster (negative: slower).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import print_table, write_result

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = {
    "train": ["--only", "full", "LoRA r16"],
    "rollout": ["--shapes", "qwen2.5-0.5b"],
    "grpo_step": ["--cases", "0.5b", "--once"],
}
LIMIT_S = 240


def run(tree: Path, script: str, out: Path, smoke: bool) -> list[dict[str, Any]]:
    """The rows of one benchmark in one tree."""
    paths = [str(tree / "src"), str(tree / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    words = [
        sys.executable,
        str(tree / "benchmarks" / f"{script}.py"),
        str(out),
        *(["--smoke"] if smoke else ARGUMENTS[script]),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        sys.exit(f"{script} failed in {tree.name}:\n{done.stderr[-2000:]}")
    return json.loads(out.read_text("utf-8"))["rows"]


def name_of(script: str, row: dict[str, Any]) -> str:
    if script == "rollout":
        return f"rollout {row['shape']}, {row['sequences']} sequences in groups of {row['group']}"
    return f"{script} {row['name']}"


def rate_of(script: str, row: dict[str, Any]) -> float:
    return 1 / row["step_s"] if script == "grpo_step" else row["tokens_per_s"]


def compare(script: str, rates: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    unit = "steps_per_s" if script == "grpo_step" else "tokens_per_s"
    rows = []
    for name, all_before in rates["before"].items():
        all_after = rates["after"][name]
        before, after = statistics.median(all_before), statistics.median(all_after)
        row = {"name": name, "unit": unit, "before": before, "after": after, "change": after / before - 1}
        rows.append({**row, "all_before": all_before, "all_after": all_after})
    return rows


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path)
    made.add_argument("--before", type=Path, required=True, metavar="FOLDER")
    made.add_argument("--scripts", nargs="+", choices=list(ARGUMENTS), default=list(ARGUMENTS))
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--smoke", action="store_true", help="the tiny model, to try the script")
    asked = made.parse_args()
    trees = {"before": asked.before.resolve(), "after": ROOT}
    result: dict[str, Any] = {"smoke": asked.smoke, "rounds": asked.rounds, "rows": []}
    for script in asked.scripts:
        rates: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(asked.rounds):
                for side, tree in trees.items():
                    for row in run(tree, script, Path(folder) / f"{side}{number}.json", asked.smoke):
                        rates[side].setdefault(name_of(script, row), []).append(rate_of(script, row))
        result["rows"] += compare(script, rates)
        write_result(asked.out, result)
    print_table("speed before and after", result["rows"], ["name", "unit", "before", "after", "change"])


if __name__ == "__main__":
    main()
