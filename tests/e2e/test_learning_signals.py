"""Learning signals besides one reward per rollout: a killed run and the split layout give the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import WarmPython
from .helpers.runs import Run, assert_same_run, assert_trained_once, base_config, fingerprint
from .helpers.split import InOne, compared, split_config, split_run

BONUS = {"coef": 0.01, "target": 9.0, "delta": 0.01, "top_fraction": 0.5}  # the target is above any entropy: it rises
TWO_TURNS = """
from shoal.core.types import Reward
from shoal.envs.base import MultiTurn, ask

class TwoTurns(MultiTurn):
    max_turns = 3
    sees_tokens = True

    def __init__(self, wrong: bool = False):
        self.wrong = wrong

    def tasks(self, split):
        return [ask(f"count from {i}") for i in range(50)]

    async def reply(self, task, messages):
        return "go on" if len(messages) < 4 else None

    def reward(self, task, messages):
        answers = [m for m in messages if m["role"] == "assistant"]
        turns = [float(len(m["content"]) % 3) for m in answers]
        tokens = [[0.0] * (len(m["token_ids"]) - 1) + [r] for m, r in zip(answers, turns)]
        kinds = ["policy", "cross_entropy", "ignore"][: len(turns)]
        return Reward(parts={"total": sum(turns)}, turns=turns * (1 + self.wrong), tokens=tokens, kinds=kinds)
"""
TURNS = {"env": [{"id": "two_turns.py:TwoTurns"}], "sampling": {"max_tokens": 6}}
SIGNALS: dict[str, dict[str, Any]] = {
    "entropy": {"train": {"loss": {"type": "vespo", "entropy": BONUS}}, "orch": {"advantage": {"std": "mean"}}},
    "turns": {
        "train": {"loss": {"type": "grpo", "context_cross_entropy": 0.1}},
        "orch": {**TURNS, "advantage": {"credit": "return", "discount": 0.9}},
    },
    "tokens": {"orch": {**TURNS, "advantage": {"credit": "token"}}},
    "parts": {"orch": {**TURNS, "advantage": {"per_part": True, "rescale": True}}},
}


def some(*kept: str) -> list[Any]:
    """All kinds of signals; most of them only in `make faults`."""
    return [kind if kind in kept else pytest.param(kind, marks=pytest.mark.faults) for kind in SIGNALS]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "two_turns.py"
    file.write_text(TWO_TURNS)
    for config in SIGNALS.values():
        if "env" in config.get("orch", {}):
            config["orch"]["env"] = [{"id": f"{file}:TwoTurns"}]


@pytest.mark.parametrize("kind", some("entropy", "turns"))
def test_a_killed_run_continues_with_its_signals(tmp_path: Path, warm: WarmPython, model: Path, kind: str) -> None:
    def run_of(name: str) -> Run:
        config = base_config(model)
        for section, values in SIGNALS[kind].items():
            config[section] |= values
        return Run(tmp_path / name, warm).write(config)

    undisturbed, killed = run_of("undisturbed"), run_of("killed")
    command = undisturbed.grpo()
    assert command.wait() == 0, command.text()
    assert killed.start(kill_at=("written:step_000003.jsonl", 1)).wait() == -9
    command = killed.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert_trained_once(killed, 4)
    assert_same_run(killed, fingerprint(undisturbed))
    if kind == "entropy":
        coefs = [step["policy/entropy_coef"] for step in killed.steps()]
        assert coefs == pytest.approx([0.0, 0.02, 0.03, 0.04])


def test_what_rollout_files_have_of_turns(tmp_path: Path, warm: WarmPython, model: Path) -> None:
    config = base_config(model)
    config["orch"] |= SIGNALS["turns"]["orch"] | {"max_async_level": 1}
    config["train"] |= SIGNALS["turns"]["train"]
    run = Run(tmp_path / "run", warm).write(config)
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 4)
    several = [r for r in run.rollouts() if len(r["turn_tokens"]) == 2 and r["advantage"] is not None]
    assert several
    for rollout in several:
        first, second = rollout["turn_tokens"]
        assert len(rollout["turn_rewards"]) == 2 and rollout["kinds"] == ["policy", "cross_entropy"]
        assert [len(turn) for turn in rollout["token_rewards"]] == [first, second]
        assert rollout["reward"] == pytest.approx(sum(rollout["turn_rewards"]))
        assert [len(turn) for turn in rollout["token_advantages"]] == [1, 1]
        if rollout["policy_logprobs"] is not None:  # trained: the reply of the environment is under cross-entropy
            assert sum(rollout["loss_mask"]) == len(rollout["token_ids"])
            assert all(value < 0 for value in rollout["policy_logprobs"])


def test_a_list_of_the_wrong_length_is_an_error_of_its_rollout(tmp_path: Path, warm: WarmPython, model: Path) -> None:
    config = base_config(model)
    config["orch"] |= SIGNALS["turns"]["orch"]
    config["orch"]["env"] = [{**config["orch"]["env"][0], "args": {"wrong": True}}]
    run = Run(tmp_path / "run", warm).write(config)
    command = run.grpo("train.max_steps=1")
    assert command.wait() != 0
    errors = {rollout["error"] for rollout in run.rollouts()}
    assert len(errors) <= 3 and all("turns of the policy" in error for error in errors), errors


@pytest.mark.parametrize("kind", some("turns"))
def test_split_equals_one_process(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne, kind: str) -> None:
    with split_run(tmp_path, warm, split_config(model, **SIGNALS[kind])) as run:
        run.start_all()
        assert run.end() == dict.fromkeys(run.processes, 0)
        wanted, found = in_one(**SIGNALS[kind]), compared(run)
        for name, value in wanted.items():
            assert found[name] == value, f"{name} differs"
