"""Changes one key of a short GRPO run at a time and measures the held-out reward, with three seeds, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/ablations.py [--out FILE] [--seeds 1 2 3] [--only NAME ...] [--minutes M]

`experiments/ablations/` has the base configuration, the arms and the task. All arms of a seed start from the same
warm-up checkpoint. The result is written after every run. A campaign that ended early continues with the runs that
are missing. All runs share one process, because the imports take longer than a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from machine import write_result

from shoal import api
from shoal.build.load import load
from shoal.config.load import load_run, load_supervised
from shoal.config.resolve import resolve_supervised
from shoal.config.rules import check_supervised
from shoal.config.schema import SftConfig
from shoal.core.errors import Interrupted, ShoalError
from shoal.runs.run_dir import read_metrics

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "ablations"
RESULT = ROOT / "benchmarks" / "results" / "ablations_cpu.json"
BASE = "base"
WARM_UP_SEED, WARM_UP_ROWS = 1000, 5000  # the warm-up sees other prompts than the runs
HELD_OUT = "eval/exact-reverse/mean"


class Arm(NamedTuple):
    name: str
    overrides: list[str]  # as on the command line; empty for the base run


def read_arms() -> list[Arm]:
    groups = read_config("arms.yaml").values()
    return [Arm(BASE, []), *(Arm(name, keys) for arms in groups for name, keys in arms.items())]


def read_config(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXPERIMENT / name).read_text("utf-8"))


def import_task() -> Any:
    sys.path.insert(0, str(EXPERIMENT))
    import task

    return task


def warm_up(folder: Path, seed: int) -> Path:
    """The checkpoint from which all arms of a seed start."""
    from shoal.models.random_models import make_model

    folder.mkdir()
    make_model("tiny", folder / "model", seed)
    module, rng = import_task(), random.Random(seed)
    task = module.ExactReverse(seed=seed + WARM_UP_SEED, num_train=WARM_UP_ROWS)
    with (folder / "solved.jsonl").open("w", encoding="utf-8") as file:
        for row in task.tasks("train"):
            answer = {"role": "assistant", "content": module.warm_up_answer(row, rng)}
            file.write(json.dumps({"messages": [*row.messages, answer]}) + "\n")
    config = read_config("warm_up.yaml")
    config["train"] |= {"model": str(folder / "model"), "output_dir": str(folder / "sft"), "seed": seed}
    config["dataset"] = {"path": str(folder / "solved.jsonl")}
    draft = load_supervised(SftConfig, write_yaml(folder / "sft.yaml", config))
    check_supervised(draft.config).raise_errors(draft.origins)
    api.sft(resolve_supervised(draft.config))
    return folder / "sft" / "final"


def write_yaml(file: Path, config: dict[str, Any]) -> str:
    file.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return str(file)


def run_arm(arm: Arm, seed: int, model: Path, folder: Path) -> dict[str, Any]:
    config = read_config("config.yaml")
    config["train"] |= {"model": str(model), "output_dir": str(folder / "run"), "seed": seed}
    task = f"{EXPERIMENT / 'task.py'}:ExactReverse"
    config["orch"]["env"] = [{"id": task, "name": "exact-reverse", "args": {"seed": seed}}]
    start, cpu = time.monotonic(), time.process_time()
    found: dict[str, Any] = {"arm": arm.name, "seed": seed}
    try:
        run = api.train(load(load_run(write_yaml(folder / "run.yaml", config), overrides=arm.overrides)))
    except Interrupted:
        raise
    except ShoalError as error:  # recorded, so that the other arms are still measured
        return {**found, "error": str(error)}
    spent = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - cpu}
    return {**found, **figures(read_metrics(run)), **{key: round(value, 2) for key, value in spent.items()}}


def figures(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [line for line in metrics if "reward/mean" in line]
    rates = {f"{key}_mean": mean(steps, name) for key, name in PER_STEP.items()}
    return {
        "held_out": {line["step"]: round(line[HELD_OUT], 4) for line in metrics if HELD_OUT in line},
        "reward": [round(line["reward/mean"], 4) for line in steps],
        "step_seconds": round(sum(line.get("time/step", 0.0) for line in metrics), 2),
        **{key: value for key, value in rates.items() if value is not None},
    }


PER_STEP = {
    "rollouts": "batch/rollouts",
    "mixed": "group/mixed_frac",
    "clipped": "policy/clip_frac",
    "staleness": "staleness/mean",
}


def mean(steps: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in steps if name in line]
    return round(sum(values) / len(values), 4) if values else None


def earlier(path: Path, described: dict[str, Any]) -> dict[str, Any]:
    """The result of an unfinished campaign, if it measured the same configuration."""
    if not path.exists():
        return {"runs": []}
    found = json.loads(path.read_text("utf-8"))
    if any(found[key] != value for key, value in described.items()):
        raise SystemExit(f"{path} was measured with another configuration; remove it, or name another file with --out")
    return found


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=RESULT)
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    made.add_argument("--only", nargs="+", metavar="NAME", help="names of arms")
    made.add_argument("--minutes", type=float, default=60.0, help="start no run after this time")
    asked = made.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    described = {"config": read_config("config.yaml"), "warm_up": read_config("warm_up.yaml")}
    described["threads"] = os.environ.get("OMP_NUM_THREADS", "unset")
    found = earlier(asked.out, described)
    runs = found["runs"]
    described |= {"note": found["note"]} if "note" in found else {}
    measured = {(run["seed"], run["arm"]) for run in runs}
    arms = [arm for arm in read_arms() if asked.only is None or arm.name in asked.only]
    with tempfile.TemporaryDirectory() as name:
        for seed in asked.seeds:
            missing = [arm for arm in arms if (seed, arm.name) not in measured]
            if not missing or time.monotonic() > end:
                continue
            model = warm_up(Path(name) / str(seed), seed)
            for arm in missing:
                if time.monotonic() > end:
                    break
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    runs.append(run_arm(arm, seed, model, Path(folder)))
                write_result(asked.out, {**described, "arms": read_config("arms.yaml"), "runs": runs})
                print(seed, arm.name, json.dumps(runs[-1].get("held_out", runs[-1])), flush=True)


if __name__ == "__main__":
    main()
