"""Runs the three quickstart files unchanged except for the model: a model of the same shape, trained a little on the
task.

python benchmarks/quickstart.py OUT.json [--shape qwen3-0.6b] [--smoke]

Random weights never write a tag, so every group would have zero variance. A few supervised steps on solved examples
replace the knowledge of the pretrained model. Then `shoal grpo` runs the files to their last step. After 300
supervised steps, rewards would start at .99 and leave little to learn.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import write_result
from workload import parser

from shoal.envs.reverse_text import ReverseText
from shoal.runs.run_dir import read_metrics

FILES = [word for name in ("train", "infer", "orch") for word in (f"--{name}", f"examples/grpo/{name}.yaml")]
KEPT = ("reward/mean", "reward/std", "mismatch/k3", "policy/entropy", "optim/grad_norm", "time/step", "time/rollout",
        "time/train", "throughput/rollout_tok_s", "throughput/train_tok_s", "completion/length_mean",
        "completion/truncated_frac", "group/mixed_frac", "masked", "noise/sigma", "tokens/computed", "time/sync",
        "time/save", "time/idle")  # fmt: skip
ENDS = 10  # steps at each end whose rewards are averaged
WRITE_S = 10.0
SMOKE = ["train.recipe=fp32", "train.max_steps=2", "orch.max_steps=2", "orch.batch_size=8",
         "orch.rollouts_per_example=4", "orch.sampling.max_tokens=16", "train.sequence_len=256",
         "orch.seq_len=256"]  # fmt: skip


def shoal(*arguments: str) -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "shoal", *arguments], check=True)
    return time.monotonic() - start


def warmed_up(shape: str, steps: int, folder: Path) -> tuple[Path, float]:
    """A folder with a model of that shape after supervised steps on solved tasks, and the median time of the steps."""
    words = ["tiny", str(folder / "model")] if shape == "tiny" else [str(folder / "model"), "--shape", shape]
    shoal("make-model", *words)
    environment = ReverseText(num_train=64 * steps)
    rows = [
        {"messages": [*task.messages, {"role": "assistant", "content": environment.solution(task)}]}
        for task in environment.tasks("train")
    ]
    data = folder / "solved.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    shoal(
        "sft", f"train.model={folder / 'model'}", f"train.output_dir={folder / 'sft'}", f"dataset.path={data}",
        f"train.max_steps={steps}", "batch_size=64", "train.sequence_len=2048", "train.learning_rate=3e-4",
        "train.lr_scheduler_type=cosine", f"train.warmup_steps={steps // 10}", "train.save_seconds=100000",
        "train.logging_steps=50",
    )  # fmt: skip
    return folder / "sft" / "final", statistics.median(line["time/step"] for line in read_metrics(folder / "sft"))


def recorded(out: Path, result: dict[str, Any], run: Path, arguments: list[str]) -> None:
    """Runs `shoal grpo` to its end. Metrics are recorded in the background."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "shoal", "grpo", *arguments])
    ended = None
    while ended is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = process.wait(WRITE_S)
        if (run / "metrics.jsonl").exists():
            result |= {"seconds": time.monotonic() - start, "exit": ended, "steps": curve(run)}
            write_result(out, result)
    if ended:
        raise SystemExit(f"shoal grpo ended with {ended}")


def curve(run: Path) -> list[dict[str, Any]]:
    return [{"step": line["step"], **{k: line[k] for k in KEPT if k in line}} for line in read_metrics(run)]


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The run in one row: its rewards at both ends, and its median step."""
    steps = result["steps"]
    rewards = [line["reward/mean"] for line in steps]
    named = {"step_s": "time/step", "rollout_s": "time/rollout", "train_s": "time/train", "k3": "mismatch/k3"}
    values = {name: [line[key] for line in steps if key in line] for name, key in named.items()}
    medians = {name: statistics.median(found) for name, found in values.items() if found}  # no k3: nothing was trained
    ends = {"reward_first": statistics.mean(rewards[:ENDS]), "reward_last": statistics.mean(rewards[-ENDS:])}
    taken = {"seconds": result["seconds"], "supervised_step_s": result["warm_up_step_s"]}
    return {"shape": result["shape"], "steps": len(steps), **taken, **ends, **medians}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", default="qwen3-0.6b")
    made.add_argument("--warm-up", type=int, default=150, help="supervised steps of 64 examples")
    asked = made.parse_args()
    shape, steps, extra = ("tiny", 2, SMOKE) if asked.smoke else (asked.shape, asked.warm_up, [])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (model, step_s), run = warmed_up(shape, steps, folder), folder / "run"
        where = [f"train.model={model}", f"infer.model={model}", f"orch.model.name={model}", f"train.output_dir={run}"]
        shown = ["train.model=MODEL", "infer.model=MODEL", "orch.model.name=MODEL", *extra]
        result: dict[str, Any] = {
            "smoke": asked.smoke, "run": ["shoal", "grpo", *FILES, *shown], "warm_up_steps": steps,
            "warm_up_step_s": step_s, "shape": shape,
        }  # fmt: skip
        recorded(asked.out, result, run, [*FILES, *where, *extra])
        result["rows"] = [summary(result)]
        result["config"] = (run / "config.yaml").read_text("utf-8").replace(str(folder), "FOLDER")
        write_result(asked.out, result)
    row = result["rows"][0]
    rewards = f"{row['reward_first']:.3f} to {row['reward_last']:.3f}"
    print(f"{row['steps']} steps in {row['seconds']:.0f} s, reward {rewards} (means of {ENDS} steps)")


if __name__ == "__main__":
    main()
