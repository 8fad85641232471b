"""`shoal demo`: a tiny model, warmed up and then improved with GRPO on reverse-text, on a CPU in a few minutes.

Everything it does can be done by hand: the two configuration files it runs are written into its folder. Run again
in the same folder, it continues where it stopped.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from shoal import api
from shoal.build.load import Run
from shoal.config.load import load_run, load_supervised
from shoal.config.resolve import resolve_run, resolve_supervised
from shoal.config.rules import check_run, check_supervised
from shoal.config.schema import RunConfig, SftConfig
from shoal.core.errors import ConfigError
from shoal.envs.reverse_text import ReverseText
from shoal.runs.checkpoints import write_folder
from shoal.runs.files import storage, write_atomic
from shoal.runs.run_dir import is_used, read_metrics

# One token a character and no system prompt: short texts, so that a step takes a fraction of a second.
TEXTS = {"min_len": 8, "max_len": 12, "system_prompt": ""}
WARM_UP_ROWS, WARM_UP_STEPS, GRPO_STEPS = 5000, 50, 240
HELD_OUT = 200


def run_demo(folder: Path, seed: int = 1) -> None:
    _prepare_folder(folder, seed)
    model = folder / "model"
    if not model.exists():
        print(f"demo 1/3: a tiny model of random weights and a character tokenizer in {model}")
        _make_model(model, seed)
    print(f"demo 2/3: warm-up, {WARM_UP_STEPS} supervised steps on solved examples (shoal sft {folder / 'sft.yaml'})")
    _write_examples(folder / "warm-up.jsonl", seed)
    api.sft(_sft_config(folder), resume=is_used(folder / "sft"))
    print(f"demo 3/3: GRPO, {GRPO_STEPS} steps on rewards alone (shoal grpo {folder / 'grpo.yaml'})")
    run = api.train(Run(_grpo_config(folder), resume=is_used(folder / "grpo")))
    before, after = held_out(run)
    again = f"{shlex.quote(str(folder / 'grpo.yaml'))} train.output_dir={shlex.quote(str(folder / 'again'))}"
    print(f"held-out reward: {before:.3f} after the warm-up, {after:.3f} after GRPO ({after - before:+.3f})")
    print(f"the run is in {run}: open {run / 'report.html'} to read its curves and every rollout")
    # With one optimizer step a step nothing is ever clipped, and losses that clip otherwise are the same.
    other = "train.loss.type=dapo train.minibatches=4"
    print(f"try next: shoal grpo {again} {other}, or your own task (docs/tutorial.md)")


def held_out(run: Path) -> tuple[float, float]:
    """Mean held-out reward before the first step and after the last."""
    means = [line["eval/reverse-text/mean"] for line in read_metrics(run) if "eval/reverse-text/mean" in line]
    return means[0], means[-1]


def _prepare_folder(folder: Path, seed: int) -> None:
    """Write the two configurations, or find the same ones there; anything else in the folder is somebody's work."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"command line: --dir: {folder} is a file; name a folder")
    plans = {folder / "sft.yaml": _sft(folder, seed), folder / "grpo.yaml": _grpo(folder, seed)}
    with storage(f"write the demo into {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / "sft.yaml").exists():
            raise ConfigError(f"command line: --dir: {folder} is not empty and holds no demo; name another folder")
        texts = {file: yaml.safe_dump(plan, sort_keys=False) for file, plan in plans.items()}
        for file, text in texts.items():
            if file.exists() and file.read_text("utf-8") != text:
                raise ConfigError(
                    f"command line: --dir: {file} is not what this demo runs (another --seed, or it was edited); "
                    "name another folder with --dir, or remove this one"
                )
    for file, text in texts.items():
        write_atomic(file, text.encode())


def _make_model(folder: Path, seed: int) -> None:
    from shoal.models.random_models import make_model

    with write_folder(folder) as unfinished:
        make_model("tiny", unfinished, seed)


def _write_examples(file: Path, seed: int) -> None:
    """Solved tasks of the train split; what is evaluated is never among them."""
    environment = ReverseText(**TEXTS, num_train=WARM_UP_ROWS, seed=seed)
    lines = (
        json.dumps({"messages": [*task.messages, {"role": "assistant", "content": environment.solution(task)}]}) + "\n"
        for task in environment.tasks("train")
    )
    write_atomic(file, (line.encode() for line in lines))


def _sft_config(folder: Path) -> SftConfig:
    loaded = load_supervised(SftConfig, str(folder / "sft.yaml"))
    check_supervised(loaded.config).raise_errors(loaded.origins)
    return resolve_supervised(loaded.config)


def _grpo_config(folder: Path) -> RunConfig:
    loaded = load_run(str(folder / "grpo.yaml"))
    check_run(loaded.config).raise_errors(loaded.origins)
    return resolve_run(loaded.config)


def _sft(folder: Path, seed: int) -> dict[str, Any]:
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
        "dataset": {"path": str(folder / "warm-up.jsonl")},
        "batch_size": 64,
    }


def _grpo(folder: Path, seed: int) -> dict[str, Any]:
    return {
        "train": {
            "model": str(folder / "sft" / "final"),
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
