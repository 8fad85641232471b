"""One warm Python and one warmed-up tiny model for all end-to-end tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import WarmPython
from .helpers.runs import REVERSE_ARGS, SUM_ARGS, Run, base_config
from .helpers.split import InOne, colocated_config, compared, split_config

WARM_UP = ["train.learning_rate=3e-3", "train.sequence_len=256", "batch_size=32", "train.save_steps=1000"]


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    python = WarmPython()
    yield python
    python.close()


@pytest.fixture(scope="session")
def raw_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny model made tinier, random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from shoal.models.shapes import character_tokenizer, tiny_config

    folder = tmp_path_factory.mktemp("models") / "raw"
    tokenizer = character_tokenizer()
    config = tiny_config(len(tokenizer))
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 128, 2
    config.layer_types = ["full_attention"] * 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tasks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Solved tasks of the environments the tests train on; the quickstart's have a long prompt of their own."""
    from shoal.envs.registry import load_environment

    file = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    with file.open("w") as lines:
        quickstart = ("reverse-text", {"num_train": 80})
        for name, args in (("reverse-text", REVERSE_ARGS), ("arithmetic", SUM_ARGS), quickstart):
            environment: Any = load_environment(name, args)
            for task in environment.tasks("train"):
                answer = {"role": "assistant", "content": environment.solution(task)}
                lines.write(json.dumps({"messages": [*task.messages, answer]}) + "\n")
    return file


@pytest.fixture(scope="session")
def model(warm: WarmPython, raw_model: Path, tasks_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After a few supervised steps: right often enough that most groups are mixed."""
    folder = tmp_path_factory.mktemp("warm-up")
    arguments = ["--model", str(raw_model), "--dataset", str(tasks_file), "--output-dir", "out", "--max-steps", "60"]
    command = warm.run(["sft", *arguments, *WARM_UP], folder)
    assert command.wait() == 0, command.text()
    return folder / "out" / "final"


@pytest.fixture
def new_run(warm: WarmPython, model: Path, tmp_path: Path) -> Callable[..., Run]:
    """new_run(name, train={...}, orch={...}): a folder with run.yaml, nothing started yet."""

    def make(name: str = "run", **sections: dict[str, Any]) -> Run:
        config = base_config(model)
        for section, values in sections.items():
            config.setdefault(section, {}).update(values)
        return Run(tmp_path / name, warm).write(config)

    return make


@pytest.fixture(scope="session")
def in_one(tmp_path_factory: pytest.TempPathFactory, warm: WarmPython, model: Path) -> InOne:
    """What the same run comes to in one process; computed once for each configuration."""
    known: dict[str, dict[str, Any]] = {}

    def compute(**changes: Any) -> dict[str, Any]:
        key = repr(changes)
        if key not in known:
            config = colocated_config(split_config(model, **changes))
            run = Run(tmp_path_factory.mktemp("in-one"), warm).write(config)
            command = run.grpo()
            assert command.wait() == 0, command.text()
            known[key] = compared(run)
        return known[key]

    return compute
