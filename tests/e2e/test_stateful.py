"""A model that calls tools trains in a stateful environment: killed and resumed, and through GRPOTrainer."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from shoal import GRPOConfig, GRPOTrainer
from shoal.core.errors import ArgumentError
from support.calling_model import write_calling_model

from .helpers.processes import WarmPython
from .helpers.runs import Run, assert_same_run, assert_trained_once, base_config, fingerprint

STEPS = 2
PAGE = Path(__file__).parents[2] / "docs/environments.md"
ENVIRONMENT = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").partition("## Stateful")[2], re.DOTALL
)[0]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("calling"))


def run_of(folder: Path, warm: WarmPython, model: Path, **orch: Any) -> Run:
    config = base_config(model)
    config["train"] |= {"max_steps": STEPS, "save_steps": 1, "sequence_len": 192}
    config["orch"] |= {"env": "increment.py:Increment", "batch_size": 8, "sampling": {"max_tokens": 64}, **orch}
    run = Run(folder, warm).write(config)
    (folder / "increment.py").write_text(ENVIRONMENT)
    return run


@pytest.mark.long("three runs of the command")
def test_killed_run_continues_with_equal_bits(tmp_path: Path, warm: WarmPython, calling: Path) -> None:
    whole = run_of(tmp_path / "whole", warm, calling)
    assert whole.grpo().wait() == 0
    rollouts = whole.rollouts()
    called = [rollout for rollout in rollouts if "[tool]" in rollout["completion"]]
    assert len(called) > len(rollouts) / 2 and {rollout["status"] for rollout in rollouts} == {"ok"}
    for rollout in called:
        wanted = int(rollout["prompt"].removesuffix(".")[-1])
        count = int(rollout["completion"].partition("[tool] ")[2][0])
        assert rollout["parts"]["right"] == (wanted == count)
    assert sum(step["batch/used"] for step in whole.steps()) > 0
    assert all("time/environment" in line for line in whole.lines("metrics.jsonl") if line["step"] > 0)

    killed = run_of(tmp_path / "killed", warm, calling, stateful={"processes": 3})  # rollouts wait for a process
    assert killed.start(kill_at=("appended:journal.jsonl", 1)).wait() == -9
    assert killed.grpo("--resume").wait() == 0
    assert_trained_once(killed, STEPS)
    assert_same_run(killed, fingerprint(whole))


class IncrementEnv:
    """As in TRL's documentation: the environment draws its task and computes the reward."""

    def reset(self, **kwargs: Any) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def counted(completions: Any, environments: Any, **kwargs: Any) -> list[float]:
    """A reward function that reads the state of the environments."""
    return [0.1 * environment.counter for environment in environments]


def test_environment_factory_of_trl(calling: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_completion_length": 64, "use_cpu": True, "bf16": False}
    args = GRPOConfig(max_steps=1, output_dir=str(tmp_path / "run"), max_tool_calling_iterations=1, **settings)
    trainer = GRPOTrainer(str(calling), args=args, environment_factory=IncrementEnv, reward_funcs=counted)
    trainer.train()
    (metrics,) = [line for line in trainer.metrics if line["step"] == 1]
    assert metrics["reward/error_frac"] == 0 and metrics["batch/rollouts"] == 8
    for rollout in map(json.loads, (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()):
        parts, count = rollout["parts"], int((rollout["completion"].partition("[tool] ")[2] or "0")[0])
        wanted = int(rollout["prompt"].removesuffix(".")[-1])
        assert parts["IncrementEnv"] == (count == wanted) and parts["counted"] == pytest.approx(0.1 * count)
        assert rollout["reward"] == pytest.approx(parts["IncrementEnv"] + parts["counted"])


class Silent:
    """An environment without a reward."""

    def reset(self, **kwargs: Any) -> None: ...

    def press(self) -> None:
        """Press the button."""


def test_environment_factory_argument_errors(tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path))
    with pytest.raises(ArgumentError, match="max_steps: is needed without a train_dataset"):
        GRPOTrainer("model", args=args, environment_factory=IncrementEnv)
    with pytest.raises(ArgumentError, match="train_dataset"):
        GRPOTrainer("model", reward_funcs=counted)
    with pytest.raises(ArgumentError, match="environment_factory: must be a class"):
        GRPOTrainer("model", environment_factory=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="column `environment` selects one"):
        GRPOTrainer("model", environment_factory={"a": IncrementEnv}, device="cpu", output_dir=str(tmp_path))
    with pytest.raises(ArgumentError, match="has no get_reward"):
        GRPOTrainer("model", environment_factory=Silent, device="cpu", output_dir=str(tmp_path))
    with pytest.raises(ArgumentError, match="is not used without environment_factory"):
        GRPOTrainer("model", [{"prompt": "x"}], counted, args=GRPOConfig(max_tool_calling_iterations=2))
