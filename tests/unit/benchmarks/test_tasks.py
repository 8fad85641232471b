"""The experiments with the tiny model: their configurations are valid, and times to a reward are read correctly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.config.load import load_run, load_supervised
from shoal.config.rules import check_run, check_supervised
from shoal.config.schema import SftConfig
from support.pages import ROOT

TASKS = ("arithmetic", "reverse-text", "countdown", "spell-backward", "chain-sum")


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tasks

    yield tasks
    for name in ("tasks", "processes", "machine"):
        sys.modules.pop(name, None)
    sys.path.remove(str(ROOT / "benchmarks" / "peers"))


@pytest.mark.parametrize("task", TASKS)
def test_configurations_are_valid(task: str, tasks: Any, tmp_path: Path):
    for file in (ROOT / "experiments" / task).glob("*.yaml"):
        config = yaml.safe_load(file.read_text("utf-8"))
        config["train"] |= {"model": "shape:tiny", "output_dir": str(tmp_path)}
        if file.stem == "warm_up":
            rows = tmp_path / "solved.jsonl"
            rows.write_text('{"messages": []}\n')
            config["dataset"] = {"path": str(rows)}
        copy = tmp_path / file.name
        copy.write_text(yaml.safe_dump(config))
        if file.stem == "warm_up":
            loaded = load_supervised(SftConfig, str(copy))
            check_supervised(loaded.config).raise_errors(loaded.origins)
        else:
            loaded = load_run(str(copy))
            check_run(loaded.config).raise_errors(loaded.origins)
    assert task in tasks.TASKS


def test_solved_rows_are_training_tasks(tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shoal.envs.registry import load_environment

    monkeypatch.setattr(tasks, "ROWS", 200)
    spec = tasks.read_config("arithmetic", "grpo.yaml")["orch"]["env"][0]
    tasks.write_solved(spec, tmp_path / "solved.jsonl")
    text = (tmp_path / "solved.jsonl").read_text("utf-8")
    held_out = load_environment(spec["id"], spec["args"]).tasks("eval")
    assert len(text.splitlines()) == 200
    assert not any(task.messages[0]["content"] in text for task in held_out)


def test_times_are_those_of_the_first_evaluation_that_reaches_the_reward(tasks: Any):
    rewards = (0.5, None, 0.7, 0.65, 0.85)
    metrics: list[dict[str, Any]] = [
        {"step": step, "time/step": 1.0, **({} if value is None else {"eval/arithmetic/mean": value})}
        for step, value in enumerate(rewards)
    ]
    measured = tasks.Measured(seconds=60.0, cpu_s=30.0, marks=[(10.0 * step, 5.0 * step) for step in range(5)])
    found = tasks.figures(metrics, measured)
    assert found["to"] == {"0.6": [2, 0.7, 20.0, 10.0], "0.8": [4, 0.85, 40.0, 20.0], "0.9": None}
    assert [point[0] for point in found["curve"]] == [0, 2, 3, 4]
