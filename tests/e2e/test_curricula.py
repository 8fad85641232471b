"""Environment weights that change by step, and replay of earlier groups: exact after a kill, and equal in every
layout.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import WarmPython
from .helpers.runs import REVERSE_ARGS, Run, assert_same_run, assert_trained_once, base_config, fingerprint
from .helpers.split import InOne, compared, split_config, split_run

# From all prompts of the texts to all of the sums within four steps. Half as many groups as sampled are replayed.
CURRICULUM: dict[str, Any] = {
    "train": {"learning_rate": 1e-3, "loss": {"type": "grpo", "kl": {"beta": 0.05, "in": "reward"}}},
    "orch": {
        "env": [
            {"id": "reverse-text", "args": REVERSE_ARGS, "weight": {1: 1, 4: 0}},
            {"id": "reverse-text", "args": {**REVERSE_ARGS, "seed": 1}, "name": "other", "weight": {1: 0, 4: 1}},
        ],
        "batch_size": 16,
        "buffer": {"replay": {"fraction": 0.5, "max_age": 2}},
    },
}
# Shares of 4 prompts per step: 4, 4·⅔, 4·⅓ and 0 of the first environment.
SHARES = [1.0, 0.75, 0.25, 0.0]


def config_of(model: Path, **orch: Any) -> dict[str, Any]:
    config = base_config(model)
    for section, values in CURRICULUM.items():
        config[section] |= values
    config["orch"] |= orch
    return config


def assert_replayed(run: Run, max_age: int = 2) -> None:
    """Replayed groups are trained under separate ids, are not sampled or stored again, and are never too old."""
    steps, sampled = run.steps(), {rollout["rollout_id"]: rollout["step"] for rollout in run.rollouts()}
    assert_trained_once(run, len(steps))
    for step, record in zip(steps, run.journal(), strict=True):
        replayed = [name for name in record["rollout_ids"] if name.rpartition("/")[0] in record.get("replayed", [])]
        fresh = [name for name in record["rollout_ids"] if name not in replayed]
        assert step["batch/used"] == len(fresh) and {sampled[name] for name in fresh} == {record["step"]}
        assert step["replay/frac"] == pytest.approx(len(replayed) / len(record["rollout_ids"]))
        assert all(1 <= record["step"] - sampled[_sampled_as(name)] <= max_age for name in replayed)
        assert len(record.get("replayed", [])) <= 2
    assert sum(step["replay/frac"] > 0 for step in steps) >= 2
    assert "replay/age" not in steps[0] and any(step.get("replay/age", 0) >= 1 for step in steps)


def _sampled_as(name: str) -> str:
    """The id under which a replayed rollout was sampled: env/index/epoch/attempt/position with attempt 0."""
    group, _, position = name.rsplit("/", 2)
    return f"{group}/0/{position}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: WarmPython, model: Path) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed"), warm).write(config_of(model))
    command = run.grpo()
    assert command.wait() == 0, command.text()
    return run


def test_curriculum_with_replay(undisturbed: Run) -> None:
    assert_replayed(undisturbed)
    steps = undisturbed.steps()
    drawn = [Counter(rollout["env"] for rollout in undisturbed.rollouts() if rollout["step"] == n) for n in range(1, 5)]
    for step, envs, share in zip(steps, drawn, SHARES, strict=True):
        assert step["batch/env/reverse-text"] == pytest.approx(share, abs=0.25)
        assert step["batch/env/reverse-text"] == pytest.approx(envs["reverse-text"] / envs.total())
        assert step["batch/env/other"] == pytest.approx(1 - step["batch/env/reverse-text"])
    assert (steps[0]["batch/env/other"], steps[3]["batch/env/reverse-text"]) == (0, 0)
    assert steps[0]["mismatch/k3"] < 1e-9 < steps[3]["mismatch/k3"], "replayed tokens are off-policy"


@pytest.mark.parametrize("place", [("written:step_000003.jsonl", 1), ("appended:journal.jsonl", 3)])
def test_killed_run_continues_exactly(
    tmp_path: Path, warm: WarmPython, model: Path, undisturbed: Run, place: tuple[str, int]
) -> None:
    run = Run(tmp_path, warm).write(config_of(model))
    assert run.start(kill_at=place).wait() == -9
    command = run.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert_same_run(run, fingerprint(undisturbed))


def test_split_equals_one_process(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne) -> None:
    with split_run(tmp_path, warm, split_config(model, **CURRICULUM)) as run:
        run.start_all()
        assert run.end() == dict.fromkeys(run.processes, 0)
        assert_replayed(run)
        wanted, found = in_one(**CURRICULUM), compared(run)
        for name, value in wanted.items():
            assert found[name] == value, f"{name} differs"


@pytest.mark.parametrize("kind", [pytest.param("ranks", marks=pytest.mark.faults), "asynchronous"])
def test_other_modes_train_nothing_twice(
    tmp_path: Path, warm: WarmPython, model: Path, undisturbed: Run, kind: str
) -> None:
    config = config_of(model, **({"max_async_level": 1} if kind == "asynchronous" else {}))
    config["train"] |= {"gpus": 2, "device": "cpu"} if kind == "ranks" else {}
    run = Run(tmp_path, warm).write(config)
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert_replayed(run, max_age=2)
    if kind == "ranks":
        for one, two in zip(undisturbed.steps()[:2], run.steps()[:2], strict=True):
            names = {"policy/loss", "optim/grad_norm", "replay/frac", "replay/age", "batch/env/other"}
            for name in names & one.keys():
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
