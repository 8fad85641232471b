"""Trains the tiny model of the demo on five tasks on a CPU: steps and seconds to a held-out reward of .6, .8 and .9.

    OMP_NUM_THREADS=1 python benchmarks/tasks.py [OUT.json] [--tasks NAME ...] [--seeds 1 2 3] [--minutes M]

The folder of a task in experiments/ has the supervised warm-up and the configuration of the GRPO run. Both are run by
the command. CPU seconds count all processes of the GRPO command from its start, with the evaluations. A repeated
command continues with the missing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

from machine import write_result  # noqa: E402
from processes import Measured, measure  # noqa: E402

EXPERIMENTS = ROOT / "experiments"
RESULT = ROOT / "benchmarks" / "results" / "tasks_cpu.json"
TASKS = ("arithmetic", "reverse-text", "countdown", "spell-backward", "chain-sum")
TARGETS = (0.6, 0.8, 0.9)
ROWS = 5000
LIMIT_S = 3600
Run = dict[str, Any]


def read_config(task: str, name: str) -> Run:
    return yaml.safe_load((EXPERIMENTS / task / name).read_text("utf-8"))


def write_solved(spec: Run, file: Path) -> None:
    """Solved training tasks; the held-out tasks have other prompts."""
    from shoal.envs.registry import load_environment

    environment: Any = load_environment(spec["id"], {**spec["args"], "num_train": ROWS})
    with file.open("w", encoding="utf-8") as stream:
        for task in environment.tasks("train"):
            answer = {"role": "assistant", "content": environment.solution(task)}
            stream.write(json.dumps({"messages": [*task.messages, answer]}) + "\n")


def run_task(task: str, seed: int, folder: Path) -> Run:
    from shoal.models.random_models import make_model

    warm_up, grpo = read_config(task, "warm_up.yaml"), read_config(task, "grpo.yaml")
    make_model("tiny", folder / "model", seed)
    write_solved(grpo["orch"]["env"][0], folder / "solved.jsonl")
    for config, model, name in ((warm_up, "model", "sft"), (grpo, "sft/final", "grpo")):
        config["train"] |= {"model": str(folder / model), "output_dir": str(folder / name), "seed": seed}
        config["train"]["device"] = "cpu"
    warm_up["dataset"] = {"path": str(folder / "solved.jsonl")}
    found: Run = {"task": task, "seed": seed, "load_average": round(os.getloadavg()[0], 1)}
    measured = {}
    for name, config in (("sft", warm_up), ("grpo", grpo)):
        file, log = folder / f"{name}.yaml", folder / f"{name}.log"
        file.write_text(yaml.safe_dump(config), "utf-8")
        command = [sys.executable, "-m", "shoal", name, str(file)]
        lines = folder / name / "metrics.jsonl"
        measured[name] = measure(command, log, lines, os.environ, LIMIT_S)
        if measured[name].code:
            message = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
            return {**found, "error": f"shoal {name} ended with {measured[name].code}: {message}"}
    metrics = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {**found, "warm_up_cpu_s": round(measured["sft"].cpu_s, 1), **figures(metrics, measured["grpo"])}


def figures(metrics: Sequence[Run], measured: Measured) -> Run:
    """`curve`: step, held-out reward, and wall-clock and CPU seconds since the start of the command."""
    curve = []
    for line, mark in zip(metrics, measured.marks, strict=True):
        for key, value in line.items():
            if key.startswith("eval/") and key.endswith("/mean"):
                curve.append([line["step"], round(value, 4), *(round(seconds, 1) for seconds in mark)])
    reached = {f"{target:g}": next((point for point in curve if point[1] >= target), None) for target in TARGETS}
    return {"curve": curve, "to": reached, "seconds": round(measured.seconds, 1), "cpu_s": round(measured.cpu_s, 1)}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path, nargs="?", default=RESULT)
    made.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    made.add_argument("--minutes", type=float, default=600.0, help="start no run after this time")
    made.add_argument("--at-once", type=int, default=1, help="runs at the same time, for a machine that is busy anyway")
    made.add_argument("--note", help="recorded with the result")
    asked = made.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    configs = {task: {name: read_config(task, f"{name}.yaml") for name in ("warm_up", "grpo")} for task in TASKS}
    earlier = json.loads(asked.out.read_text("utf-8")) if asked.out.exists() else {"runs": [], "configs": configs}
    if earlier["configs"] != configs:
        raise SystemExit(f"{asked.out} was measured with another configuration; remove it or name another file")
    runs: list[Run] = earlier["runs"]
    note = asked.note or earlier.get("note")
    measured = {(run["task"], run["seed"]) for run in runs}

    def one(pair: tuple[int, str]) -> None:
        seed, task = pair
        if (task, seed) in measured or time.monotonic() > end:
            return
        with tempfile.TemporaryDirectory() as folder:
            found = run_task(task, seed, Path(folder))
        runs.append(found)
        write_result(asked.out, {"configs": configs, "at_once": asked.at_once, "note": note, "runs": runs})
        print(json.dumps(found), flush=True)

    with ThreadPoolExecutor(asked.at_once) as pool:
        list(pool.map(one, [(seed, task) for seed in asked.seeds for task in asked.tasks]))


if __name__ == "__main__":
    main()
