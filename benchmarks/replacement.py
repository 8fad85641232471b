"""The cost of replacing zero-variance groups: the rollout rate with and without replacement, in one measurement.

python benchmarks/replacement.py OUT.json [--gpu MODEL] [--smoke]

The reward of `SomeUseful` is constant for 60 % of the prompts. Runs of `shoal grpo` with and without replacement
alternate. The result compares medians over all steps after the first two. A GPU measures MODEL, a CPU the tiny model.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from machine import print_table, write_result
from random_text import USEFUL_SHARE

from shoal.runs.run_dir import read_metrics

ROOT = Path(__file__).parents[1]
WAYS = {"without": "skip", "with": "refill"}


def make_config(model: Path, gpu: bool, smoke: bool, uniform: str, output: Path) -> dict[str, Any]:
    groups, size, tokens = (4, 4, 16) if smoke else (64, 16, 256) if gpu else (16, 8, 64)
    return {
        "train": {
            "model": str(model), "max_steps": 4 if smoke else 14, "learning_rate": 1e-6, "save_steps": 0,
            "device": "cuda" if gpu else "cpu", "sequence_len": 4096, "output_dir": str(output),
        },
        "orch": {
            "env": [{"id": f"{ROOT}/benchmarks/random_text.py:SomeUseful", "args": {"characters": 40}}],
            "batch_size": groups * size, "rollouts_per_example": size, "groups": {"uniform": uniform},
            "sampling": {"max_tokens": tokens},
        },
        "infer": {"max_num_seqs": 256 if gpu else 32},
    }  # fmt: skip


def run(config: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "-m", "shoal", "grpo", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"shoal grpo ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return read_metrics(Path(config["train"]["output_dir"]))[2:]


def figures(steps: list[dict[str, Any]]) -> dict[str, float]:
    names = ("throughput/rollout_tok_s", "batch/rollouts", "time/rollout", "time/step", "tokens/used_frac")
    found = {
        name: statistics.median(step[name] for step in steps if name in step) for name in names if name in steps[0]
    }
    surplus = [step.get("throughput/surplus_groups", 0.0) for step in steps]
    return {**found, "surplus_groups": statistics.mean(surplus), "steps": len(steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", metavar="MODEL", help="a model folder, measured on the GPU")
    parser.add_argument("--smoke", action="store_true", help="few short steps, to see that it runs")
    asked = parser.parse_args()
    steps: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = Path(asked.gpu) if asked.gpu else folder / "model"
        if not asked.gpu:
            subprocess.run([sys.executable, "-m", "shoal", "make-model", "tiny", str(model)], check=True)
        for attempt in range(1 if asked.smoke else 2):
            for way, uniform in WAYS.items():
                config = make_config(model, bool(asked.gpu), asked.smoke, uniform, folder / f"{way}-{attempt}")
                steps[way] += run(config, folder / "run.yaml")
    rows = [{"replacement": way, **figures(found)} for way, found in steps.items()]
    rates = {row["replacement"]: row["throughput/rollout_tok_s"] for row in rows}
    ratio = rates["with"] / rates["without"]
    write_result(asked.out, {"smoke": asked.smoke, "useful_share": USEFUL_SHARE, "rows": rows, "ratio": ratio})
    print_table("replacing zero-variance groups", rows, list(rows[0]))
    print(f"rollout rate with replacement: {ratio:.0%} of the rate without")


if __name__ == "__main__":
    main()
