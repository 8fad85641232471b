"""SmolLM2 on GSM8K with plain GRPO, with its supervised model as teacher, and as its own teacher, for equal minutes.

    python benchmarks/gsm8k_teacher.py OUT.json MODEL DATA [--minutes 20] [--seed 0] [--work FOLDER] [--only ARM ...]

DATA is the folder that experiments/gsm8k/prepare.py writes, and experiments/gsm8k has the configurations. All arms
start from MODEL. The minutes count from the first step; then the run gets SIGINT, and its checkpoint is evaluated on
the 500 held-out problems. The time of the supervised training is recorded beside it. With --smoke the model is tiny,
everything runs on the CPU, and a run takes 3 seconds: its rewards are all 0, which would soon end it.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import write_result
from real_run import CURVE, EXPERIMENT, SMOKE, shoal
from workload import parser

from shoal.runs.run_dir import read_metrics

HINTED = EXPERIMENT / "hinted.py"
ARMS = {"grpo": "gsm8k", "distil": "gsm8k", "self_distil": f"{HINTED}:Hinted"}  # configuration → environment
KEPT = (*CURVE, "teacher/kl", "teacher/missing_frac", "time/teacher", "group/flat")
NO_LIMIT = 1_000_000  # steps: the minutes end a run


def train(command: list[str], run: Path, minutes: float, log: Path) -> float:
    """Start a run and interrupt it `minutes` after its first step began. Returns the seconds of training."""
    print("shoal", *command, flush=True)
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "shoal", *command], stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None and not is_ready(run):
            time.sleep(0.2)
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < 60 * minutes:
            time.sleep(0.2)
        seconds = time.monotonic() - began
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        code = process.wait()
    if code != 130:
        raise SystemExit(f"the run ended with {code} before its time:\n{log.read_text()[-3000:]}")
    return seconds


def is_ready(run: Path) -> bool:
    events = run / "events.jsonl"
    return events.exists() and any(
        '"kind":"ready"' in line.replace(" ", "") for line in events.read_text().splitlines()
    )


def summary(run: Path) -> dict[str, Any]:
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    curve = [{"step": line["step"], **{k: round(line[k], 5) for k in KEPT if k in line}} for line in lines]
    shares = [line["time/teacher"] / line["time/step"] for line in lines[1:] if "time/teacher" in line]
    found: dict[str, Any] = {"steps": len(lines), "curve": curve}
    # Of the step; the first step also warms up.
    return {**found, "teacher_share": statistics.median(shares)} if shares else found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", help="SmolLM2 as a GGUF file or folder")
    made.add_argument("data", type=Path, help="folder written by experiments/gsm8k/prepare.py")
    made.add_argument("--minutes", type=float, default=20.0, help="of training per arm")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--work", type=Path, default=Path("/tmp/shoal-gsm8k-teacher"), help="run directories are written here"
    )
    made.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS))
    made.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all arms")
    asked = made.parse_args()
    smoke = asked.smoke
    work = asked.work / "smoke" if smoke else asked.work
    work.mkdir(parents=True, exist_ok=True)
    tiny = SMOKE["model"][1:2] if smoke else []  # the device
    result: dict[str, Any] = {"smoke": smoke, "seed": asked.seed, "minutes": asked.minutes, "set": asked.set}
    model = asked.model
    if smoke:
        model = str(work / "tiny")
        shoal("make-model", "tiny", model, log=work / "make-model.log")
    sft = work / "sft"
    if not (sft / "final").exists():
        words = ["sft", str(EXPERIMENT / "sft.yaml"), f"train.model={model}", f"train.output_dir={sft}",
                 f"dataset.path={asked.data / 'sft.jsonl'}", *tiny]  # fmt: skip
        words += ["train.max_steps=2", "batch_size=2"] if smoke else []
        _, result["sft_seconds"] = shoal(*words, log=work / "sft.log")
    for arm in asked.only:
        run = work / f"{arm}-{asked.seed}"
        command = [
            "grpo", str(EXPERIMENT / f"{arm}.yaml"), f"train.model={model}", f"train.output_dir={run}",
            f"train.seed={asked.seed}", f"train.max_steps={NO_LIMIT}",
            f"orch.env=[{{id: '{ARMS[arm]}', args: {{path: {asked.data / 'train'}}}}}]",
            *([f"train.teacher.model={sft / 'final'}"] if arm == "distil" else []),
            *([*tiny, *SMOKE["grpo"]] if smoke else []), *asked.set,
        ]  # fmt: skip
        seconds = train(command, run, 0.05 if smoke else asked.minutes, work / f"{arm}.log")
        number = ["--num-examples", "4" if smoke else "500", "--max-tokens", "8" if smoke else "256"]
        words = ["eval", str(run), "--env", "gsm8k", "--arg", f"path={asked.data / 'train'}", *number]
        shoal(*words, *(["--device", "cpu"] if smoke else []), log=work / f"{arm}-eval.log")
        printed = (work / f"{arm}-eval.log").read_text("utf-8").splitlines()
        result[arm] = {"command": command, "seconds": seconds, **summary(run), "eval": printed}
        write_result(asked.out, result)
        print(arm, json.dumps({k: v for k, v in result[arm].items() if k not in ("curve", "command")}), flush=True)


if __name__ == "__main__":
    main()
