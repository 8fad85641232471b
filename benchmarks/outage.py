"""What a tracker that is down costs a run: the same steps without one, with one that refuses, with one that is silent.

    python benchmarks/outage.py OUT.json [--steps 150] [--repeats 5] [--smoke]

Real clients (mlflow, wandb) against a port where nobody listens and one where somebody takes connections and is silent.
Runs take turns; a step's time is the median of the last half, by which time a client is imported. `after_s` is how much
longer the command takes from its last step to its end, in which a client may try to hand over what it has.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import print_table, wait_until_quiet, write_result
from workload import parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.helpers.models import make_raw_model, warm_up, write_tasks
from e2e.helpers.processes import WarmPython, environment, start_fresh
from e2e.helpers.runs import Run, base_config

LIMIT_S = 300.0


@contextmanager
def silent_port() -> Any:
    """Takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield listening.getsockname()[1]


def refusing_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def trackers(silent: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name → what the run reports to, and where that would be."""
    wandb = {"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
    return {
        "none": ([], {}),
        "mlflow refused": (["mlflow"], {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{refusing_port()}"}),
        "mlflow silent": (["mlflow"], {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{silent}"}),
        "wandb refused": (["wandb"], {**wandb, "WANDB_BASE_URL": f"http://127.0.0.1:{refusing_port()}"}),
    }


def measure(run: Run, where: dict[str, str]) -> dict[str, float]:
    start = time.monotonic()
    command = start_fresh(["grpo", "run.yaml"], run.folder, environment(**where))
    code = command.wait(LIMIT_S)
    seconds = time.monotonic() - start
    if code:
        raise SystemExit(f"{run.folder}: ended with {code}:\n{command.text()[-2000:]}")
    lines = run.lines("metrics.jsonl")
    steps = [line["time/step"] for line in lines if line["step"] > 0]
    last = (run.path / "metrics.jsonl").stat().st_mtime
    return {
        "step_s": statistics.median(steps[len(steps) // 2 :]),
        "mean_step_s": statistics.mean(steps[len(steps) // 2 :]),
        "seconds": seconds,
        "after_s": (run.path / "report.html").stat().st_mtime - last,
        "warnings": float(len(run.events("sink"))),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=150)
    made.add_argument("--repeats", type=int, default=5)
    asked = made.parse_args()
    steps, repeats = (4, 1) if asked.smoke else (asked.steps, asked.repeats)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name, silent_port() as silent:
        folder, warm = Path(name), WarmPython()
        raw, tasks = make_raw_model(folder / "raw"), write_tasks(folder / "tasks.jsonl")
        (folder / "warm-up").mkdir()
        model = warm_up(warm, raw, tasks, folder / "warm-up")
        warm.close()
        kinds = trackers(silent)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        idle = wait_until_quiet(0.0 if asked.smoke else 60.0)
        for repeat in range(repeats):
            for kind, (report_to, where) in kinds.items():
                config = base_config(model)
                config["train"] |= {"max_steps": steps, "save_steps": 10 * steps, "report_to": report_to}
                run = Run(folder / f"{kind.replace(' ', '-')}-{repeat}", warm).write(config)
                found[kind].append(measure(run, where))
                write_result(asked.out, summary(found, asked.smoke, idle))
    result = summary(found, asked.smoke, idle)
    print_table("a tracker that is down", result["rows"], ["tracker", "step_s", "slower", "seconds", "after_s"])


def summary(found: dict[str, list[dict[str, float]]], smoke: bool, idle: float) -> dict[str, Any]:
    """Each run beside the one without a tracker of the same round; the median of the rounds."""
    rows = []
    for kind, runs in found.items():
        pairs = list(zip(runs, found["none"], strict=False))
        if pairs:
            slower = [run["mean_step_s"] / plain["mean_step_s"] - 1 for run, plain in pairs]
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            rows.append({"tracker": kind, **middle, "slower": statistics.median(slower), "all_slower": slower})
    return {"smoke": smoke, "idle_share": idle, "rows": rows}


if __name__ == "__main__":
    main()
