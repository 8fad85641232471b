"""A whole run through the commands: SFT, GRPO and evaluation of SmolLM2 on GSM8K, with a complete time split.

    python benchmarks/real_run.py OUT.json MODEL DATA [--seed 0] [--work FOLDER] [--sft KEY=VALUE] [--grpo KEY=VALUE]

DATA is the folder that experiments/gsm8k/prepare.py writes, and experiments/gsm8k has the configurations. `--only`
selects parts: an earlier run in the same work folder supplies the others. With --smoke the model is tiny, and
everything runs on the CPU.

The seconds of a command are divided into: `start`, before the first optimizer step (stages are listed beside it);
per step the phases of the metrics, where `capture` overlaps with rollouts and training, rewards with rollouts, and
`replaced_rollouts` is the part of the rollouts whose groups were dropped; `end`, after the last step. In SFT, `train`
is what saves and evaluations leave of the steps.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import write_result
from workload import parser

from shoal.runs.run_dir import read_metrics

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "gsm8k"
PHASES = ("rollout", "reward", "train", "sync", "save", "eval", "capture", "idle")
CURVE = ("reward/mean", "time/step", "tokens/used_frac", "completion/length_mean", "completion/truncated_frac",
         "policy/entropy", "mismatch/k3", "throughput/rollout_tok_s", "throughput/train_tok_s", "batch/rollouts",
         "time/rollout", "time/train", "time/reward", "time/save", "time/capture", "time/idle", "sft/loss")  # fmt: skip
SMOKE = {
    "model": ["train.model=shape:tiny", "train.device=cpu", "train.max_steps=2"],
    "sft": ["batch_size=2"],
    "grpo": ["orch.batch_size=8", "orch.rollouts_per_example=4", "orch.sampling.max_tokens=8",
             "orch.groups.uniform=keep"],
}  # fmt: skip


def shoal(*words: str, log: Path) -> tuple[float, float]:
    """Run a command; returns when it started (Unix time) and how long it took."""
    print("shoal", shlex.join(words), flush=True)
    started, began = time.time(), time.monotonic()
    with log.open("w") as file:
        done = subprocess.run([sys.executable, "-m", "shoal", *words], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"shoal {words[0]} ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    return started, time.monotonic() - began


def sft_command(model: str, data: Path, run: Path, smoke: bool) -> list[str]:
    return [
        "sft", str(EXPERIMENT / "sft.yaml"), f"train.model={model}", f"train.output_dir={run}",
        f"dataset.path={data / 'sft.jsonl'}", *(SMOKE["model"] + SMOKE["sft"] if smoke else []),
    ]  # fmt: skip


def grpo_command(model: Path, data: Path, run: Path, seed: int, smoke: bool) -> list[str]:
    return [
        "grpo", str(EXPERIMENT / "grpo.yaml"), f"train.model={model}", f"train.output_dir={run}", f"train.seed={seed}",
        f"orch.env=[{{id: gsm8k, args: {{path: {data / 'train'}}}}}]",
        *(SMOKE["model"][1:] + SMOKE["grpo"] if smoke else []),
    ]  # fmt: skip


def split_of(run: Path, started: float, seconds: float) -> dict[str, Any]:
    """Where the time of a training command went."""
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    times = [line.get("time/step", 0.0) for line in lines]
    ready = next(event for event in events if event["kind"] == "ready")
    start_s = ready["time"] - started
    found: dict[str, Any] = {
        "seconds": seconds,
        "steps": len(lines),
        "step_s": {"median": statistics.median(times), "mean": statistics.mean(times), "max": max(times)},
        "phases_s": {phase: sum(line.get(f"time/{phase}", 0.0) for line in lines) for phase in PHASES},
        "start_s": start_s,
        "stages_s": ready["data"]["seconds"],
        "steps_s": sum(times),
        "end_s": seconds - start_s - sum(times),
    }
    if not any("time/train" in line for line in lines):  # SFT: what is left of a step is training
        found["phases_s"]["train"] = sum(times) - sum(found["phases_s"][name] for name in ("save", "eval"))
    if lines and "tokens/used_frac" in lines[-1]:
        used = [(line["time/rollout"], line.get("tokens/used_frac", 0.0)) for line in lines if "time/rollout" in line]
        found["phases_s"]["replaced_rollouts"] = sum(time_s * (1 - share) for time_s, share in used)
    found["curve"] = [{"step": line["step"], **{k: round(line[k], 5) for k in CURVE if k in line}} for line in lines]
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", help="SmolLM2 as a GGUF file or folder")
    made.add_argument("data", type=Path, help="folder written by experiments/gsm8k/prepare.py")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--work", type=Path, default=Path("/tmp/shoal-real-run"), help="run directories are written here")
    made.add_argument("--only", nargs="+", choices=["sft", "grpo", "eval"], default=["sft", "grpo", "eval"])
    made.add_argument("--sft", nargs="*", default=[], metavar="KEY=VALUE")
    made.add_argument("--grpo", nargs="*", default=[], metavar="KEY=VALUE")
    made.add_argument("--split", choices=["train", "test"], default="test", help="problems of the evaluation")
    asked = made.parse_args()
    work, smoke = asked.work, asked.smoke
    work.mkdir(parents=True, exist_ok=True)
    sft, grpo = work / "sft", work / f"grpo-{asked.seed}"
    result: dict[str, Any] = {"smoke": smoke, "seed": asked.seed, "sft": asked.sft, "grpo": asked.grpo}
    commands = {
        "sft": [*sft_command(asked.model, asked.data, sft, smoke), *asked.sft],
        "grpo": [*grpo_command(sft / "final", asked.data, grpo, asked.seed, smoke), *asked.grpo],
    }
    for name in ("sft", "grpo"):
        if name in asked.only:
            started, seconds = shoal(*commands[name], log=work / f"{name}.log")
            run = sft if name == "sft" else grpo
            result[f"{name}_run"] = {"command": commands[name], **split_of(run, started, seconds)}
            write_result(asked.out, result)
    if "eval" in asked.only:
        number = ["--num-examples", "4" if smoke else "1319", "--max-tokens", "8" if smoke else "256"]
        problems = f"path={asked.data / asked.split}"
        words = ["eval", str(grpo), "--against", str(sft), "--env", "gsm8k", "--arg", problems]
        log = work / "eval.log"
        _, seconds = shoal(*words, *number, *(["--device", "cpu"] if smoke else []), log=log)
        result["eval"] = {"split": asked.split, "seconds": seconds, "printed": log.read_text("utf-8").splitlines()}
        write_result(asked.out, result)
        print(log.read_text("utf-8"))
    for name in ("sft_run", "grpo_run"):
        if name in result:
            print(name, json.dumps({k: v for k, v in result[name].items() if k not in ("curve", "command")}))


if __name__ == "__main__":
    main()
