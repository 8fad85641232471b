"""`shoal demo`: a tiny model, warmed up and then improved with GRPO on reverse-text, on a CPU in a few minutes.

Everything it does can be done by hand: the two configuration files it runs are written into its folder. Run again
in the same folder, it continues where it stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from shoal import api
from shoal.config.checks import check_run, check_sft
from shoal.config.load import load_run, load_sft
from shoal.config.resolve import resolve_run, resolve_sft
from shoal.envs.reverse_text import ReverseText
from shoal.observability.run_dir import is_used, read_metrics

# One token a character and no system prompt: short texts, so that a step takes a fraction of a second.
TEXTS = {"min_len": 8, "max_len": 12, "system_prompt": ""}
WARM_UP_ROWS, WARM_UP_STEPS, GRPO_STEPS = 5000, 50, 240
HELD_OUT = 200


def run_demo(folder: Path, seed: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not (model / "config.json").exists():
        print(f"demo 1/3: a tiny model of random weights and a character tokenizer in {model}")
        api.make_model("tiny", model, seed)
    print(f"demo 2/3: warm-up, {WARM_UP_STEPS} supervised steps on solved examples (shoal sft {folder / 'sft.yaml'})")
    warm = _warm_up(folder, seed)
    print(f"demo 3/3: GRPO, {GRPO_STEPS} steps on rewards alone (shoal grpo {folder / 'grpo.yaml'})")
    run = _improve(folder, warm, seed)
    before, after = held_out(run)
    print(f"held-out reward: {before:.3f} after the warm-up, {after:.3f} after GRPO ({after - before:+.3f})")
    print(f"the run is in {run}: open {run / 'report.html'} to read its curves and every rollout")
    print(f"try next: shoal eval {run / 'final'} --env reverse-text, or your own environment (docs/start.md)")


def held_out(run: Path) -> tuple[float, float]:
    """Mean held-out reward before the first step and after the last."""
    means = [line["eval/reverse-text/mean"] for line in read_metrics(run) if "eval/reverse-text/mean" in line]
    return means[0], means[-1]


def _warm_up(folder: Path, seed: int) -> Path:
    data, file = folder / "warm-up.jsonl", folder / "sft.yaml"
    environment = ReverseText(**TEXTS, num_train=WARM_UP_ROWS, seed=seed)
    with data.open("w", encoding="utf-8") as lines:
        for task in environment.tasks("train"):
            answer = {"role": "assistant", "content": environment.solution(task)}
            lines.write(json.dumps({"messages": [*task.messages, answer]}) + "\n")
    _write(file, _sft(folder, data, seed))
    loaded = load_sft(str(file))
    check_sft(loaded.config).raise_errors(loaded.origins)
    return api.sft(resolve_sft(loaded.config), resume=is_used(folder / "sft")) / "final"


def _improve(folder: Path, warm: Path, seed: int) -> Path:
    file = folder / "grpo.yaml"
    _write(file, _grpo(folder, warm, seed))
    loaded = load_run(str(file))
    check_run(loaded.config).raise_errors(loaded.origins)
    return api.train(resolve_run(loaded.config), resume=is_used(folder / "grpo"))


def _write(file: Path, config: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")


def _sft(folder: Path, data: Path, seed: int) -> dict[str, Any]:
    return {
        "train": {
            "model": str(folder / "model"),
            "output_dir": str(folder / "sft"),
            "seed": seed,
            "max_steps": WARM_UP_STEPS,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 20,
            "adam_beta2": 0.98,
            "sequence_len": 256,
            "per_device_train_batch_size": 64,
            "logging_steps": 10,
            "save_steps": WARM_UP_STEPS,
        },
        "dataset": {"path": str(data)},
        "batch_size": 64,
    }


def _grpo(folder: Path, warm: Path, seed: int) -> dict[str, Any]:
    return {
        "train": {
            "model": str(warm),
            "output_dir": str(folder / "grpo"),
            "seed": seed,
            "max_steps": GRPO_STEPS,
            "learning_rate": 6e-4,
            "lr_scheduler_type": "linear",
            "warmup_steps": 10,
            "adam_beta1": 0.8,
            "weight_decay": 0.0,
            "sequence_len": 256,
            "per_device_train_batch_size": 64,
            "logging_steps": 10,
            "save_steps": 60,
            "loss": {"type": "grpo"},
        },
        "orch": {
            "env": [{"id": "reverse-text", "args": {**TEXTS, "seed": seed}}],
            "batch_size": 128,
            "rollouts_per_example": 8,
            "sampling": {"max_tokens": 18},
            "eval": {"interval": 60, "num_examples": HELD_OUT},
        },
    }
