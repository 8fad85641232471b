"""The start model of end-to-end runs: tiny, and right often enough that most groups have different rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .processes import WarmPython
from .runs import REVERSE_ARGS, SUM_ARGS

WARM_UP = ["train.learning_rate=3e-3", "train.sequence_len=256", "batch_size=32", "train.save_steps=1000"]


def make_raw_model(folder: Path) -> Path:
    """The tiny model of the demo, made smaller, with random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from shoal.models.random_models import character_tokenizer, tiny_config

    tokenizer = character_tokenizer()
    config = tiny_config(len(tokenizer))
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 128, 2
    config.layer_types = ["full_attention"] * 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_tasks(file: Path) -> Path:
    """Solved tasks of the environments that the tests train on. The prompts of the quickstart are long."""
    from shoal.envs.registry import load_environment

    with file.open("w") as lines:
        quickstart = ("reverse-text", {"num_train": 80})
        for name, args in (("reverse-text", REVERSE_ARGS), ("arithmetic", SUM_ARGS), quickstart):
            environment: Any = load_environment(name, args)
            for task in environment.tasks("train"):
                answer = {"role": "assistant", "content": environment.solution(task)}
                lines.write(json.dumps({"messages": [*task.messages, answer]}) + "\n")
    return file


def warm_up(warm: WarmPython, raw_model: Path, tasks_file: Path, folder: Path) -> Path:
    """Train a few supervised steps."""
    arguments = ["--model", str(raw_model), "--dataset", str(tasks_file), "--output-dir", "out", "--max-steps", "60"]
    command = warm.run(["sft", *arguments, *WARM_UP], folder)
    assert command.wait() == 0, command.text()
    return folder / "out" / "final"
