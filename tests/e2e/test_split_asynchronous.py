"""Asynchronous training in the split layout: the server samples while the trainer trains, in separate processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .helpers.processes import WarmPython
from .helpers.runs import Run, assert_same_run, assert_trained_once
from .helpers.split import SplitRun, compared, split_config, split_run

STEPS = 6
# Long answers and a high learning rate: some answers are unfinished when a version arrives.
AHEAD = {"sampling": {"max_tokens": 60, "min_tokens": 40}, "groups": {"uniform": "keep"}}
FAST = {"max_steps": STEPS, "learning_rate": 5e-3}


def finished(run: SplitRun, steps: int) -> SplitRun:
    run.start_all()
    assert run.end() == dict.fromkeys(run.processes, 0), run.texts()
    assert run.status()["state"] == "finished"
    assert_trained_once(run, steps)
    return run


def trained_ages(run: Run, step: int) -> list[int]:
    """For each trained rollout, how many versions its oldest token was behind when it was trained."""
    return [
        step - 1 - min(version for _, _, version in rollout["spans"])
        for rollout in run.rollouts()
        if rollout["step"] == step and rollout["drop_reason"] is None
    ]


def test_one_version_ahead(tmp_path: Path, warm: WarmPython, model: Path):
    """Every span has its version, and the admission rule limits the age of trained rollouts to one version."""
    config = split_config(model, train=FAST, orch={**AHEAD, "max_async_level": 1}, infer={"max_num_seqs": 2})
    with split_run(tmp_path, warm, config) as run:
        finished(run, STEPS)
        for rollout in run.rollouts():
            starts, ends, versions = map(list, zip(*rollout["spans"], strict=True))
            assert starts == [0, *ends[:-1]] and ends[-1] == len(rollout["token_ids"])
            assert versions == sorted(set(versions)) and versions[-1] <= rollout["step"] - 1
        crossing = [rollout for rollout in run.rollouts() if len(rollout["spans"]) > 1]
        assert crossing, "two slots for eight answers: some are unfinished when a version arrives, and continue"
        for step in run.steps():
            ages = trained_ages(run, step["step"])
            assert step["staleness/max"] == max(ages) <= 1
            assert step["staleness/mean"] == pytest.approx(np.mean(ages))
        assert max(step["staleness/max"] for step in run.steps()) == 1, "sampling was ahead of training"
        # At most one step of rollouts is sampled ahead, and no unneeded rollout.
        assert len(run.rollouts()) <= 8 * STEPS


def test_stale_groups_are_dropped_and_counted(tmp_path: Path, warm: WarmPython, model: Path):
    """One version ahead and no staleness allowed: groups sampled ahead are dropped before training."""
    orch = {**AHEAD, "max_async_level": 1, "max_off_policy_steps": 0}
    with split_run(tmp_path, warm, split_config(model, train=FAST, orch=orch)) as run:
        finished(run, STEPS)
        dropped = [reason for record in run.journal() for reason in record["dropped"].values()]
        assert dropped and set(dropped) == {"stale"}
        for step in run.steps():
            assert step["staleness/max"] == 0 and set(trained_ages(run, step["step"])) == {0}


def test_level_0_is_the_synchronous_split_run(tmp_path: Path, warm: WarmPython, model: Path):
    held_out: dict[str, Any] = {"eval": {"interval": 2, "num_examples": 2}}
    level_0 = {**held_out, "max_async_level": 0, "max_off_policy_steps": 0}
    found = []
    for name, orch in (("plain", held_out), ("level_0", level_0)):
        with split_run(tmp_path / name, warm, split_config(model, orch=orch)) as run:
            found.append(finished(run, 4))
    plain, other = found
    assert all(step["staleness/max"] == 0 for step in other.steps())
    assert_same_run(other, compared(plain) | {"journal": plain.journal()})
