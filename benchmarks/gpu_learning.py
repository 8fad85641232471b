"""Learning on one GPU, through the command line: SmolLM2 on arithmetic.

    python benchmarks/gpu_learning.py SMOLLM2.gguf OUT_DIR

Writes OUT_DIR/smollm2_arithmetic.json with every step's metrics.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import write_result

KEEP = ("reward/mean", "eval/arithmetic/mean", "mismatch/k3", "policy/entropy", "optim/grad_norm", "time/step",
        "time/rollout", "time/train", "throughput/rollout_tok_s", "throughput/train_tok_s", "completion/length_mean",
        "completion/truncated_frac", "group/mixed_frac", "masked", "noise/sigma")  # fmt: skip


def shoal(*arguments: str) -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "shoal", *arguments], check=True)
    return time.monotonic() - start


def curve(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{"step": line["step"], **{k: round(line[k], 6) for k in KEEP if k in line}} for line in lines]


def smollm2(model: str, out: Path, work: Path) -> None:
    run = work / "smollm2"
    arguments = [
        f"train.model={model}", f"train.output_dir={run}", "train.max_steps=120", "train.learning_rate=1e-5",
        "train.sequence_len=512", "train.per_device_train_batch_size=16", "train.loss.type=grpo",
        "train.save_seconds=100000", "orch.env=[{id: arithmetic}]",
        "orch.batch_size=256", "orch.rollouts_per_example=16",
        "orch.sampling.max_tokens=24", "orch.eval={interval: 20, num_examples: 200}",
    ]  # fmt: skip
    seconds = shoal("grpo", *arguments)
    points = curve(run)
    held_out = [p["eval/arithmetic/mean"] for p in points if "eval/arithmetic/mean" in p]
    write_result(
        out / "smollm2_arithmetic.json",
        {"command": ["shoal", "grpo", *arguments], "seconds": seconds, "held_out": held_out, "steps": points},
    )
    print(f"smollm2: held out {held_out[0]:.3f} -> {held_out[-1]:.3f} in {seconds:.0f} s")


if __name__ == "__main__":
    gguf, out_dir = sys.argv[1], Path(sys.argv[2])
    work_dir = Path("/tmp/shoal-gpu")
    shutil.rmtree(work_dir, ignore_errors=True)
    smollm2(gguf, out_dir, work_dir)
