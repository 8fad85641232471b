"""The table of docs/learning-signals.md matches the recorded runs, and the runs follow the rules of signals.py."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from support.pages import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import signals

    yield signals
    for name in ("signals", "signals_tasks", "machine", "performance_tables"):
        sys.modules.pop(name, None)


@pytest.fixture
def recorded(script: Any) -> dict[str, Any]:
    return json.loads(script.RESULT.read_text("utf-8"))


def test_page_is_current(script: Any, recorded: dict[str, Any]) -> None:
    page = script.PAGE.read_text("utf-8")
    assert page == script.write_page(page, recorded), "run python benchmarks/signals.py --page"


def test_each_arm_has_its_search_and_three_seeds(script: Any, recorded: dict[str, Any]) -> None:
    for experiment in script.EXPERIMENTS:
        runs = recorded["runs"][experiment.name]
        wanted = set()
        for arm in experiment.arms:
            wanted |= {script.key(arm, script.SEARCH_SEED, rate) for rate in script.GRID}
            wanted |= {script.key(arm, seed, script.best_rate(runs, arm)) for seed in script.SEEDS}
        assert runs.keys() == wanted
        assert script.SEARCH_SEED not in script.SEEDS


def test_run_stops_at_the_first_step_that_reaches_its_target(script: Any, recorded: dict[str, Any]) -> None:
    for experiment in script.EXPERIMENTS:
        for run in recorded["runs"][experiment.name].values():
            means = script.moving_mean(run["curves"][experiment.metric])
            target = float("inf") if run["target"] is None else run["target"]
            assert max(means[:-1], default=0.0) < target + 1e-4  # the curves are rounded
            assert len(run["curves"][experiment.metric]) == run["steps"] <= experiment.limit
            assert (run["reached"] is not None) == (run["end"] == "target") == (means[-1] >= target - 1e-4)
            assert run["reached"] in (None, run["steps"])


def test_tasks_reward_as_described(script: Any) -> None:
    import signals_tasks as tasks

    def said(*texts: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": text} for text in texts]

    exact = tasks.Exact(length=2)
    task = next(task for task in exact.tasks("train") if len(set(task.data["answer"])) == 2)
    right = exact.solution(task)
    assert [exact.reward(task, said(text)) for text in (right, right[::-1], right + "a", "")] == [1.0, 0.0, 0.0, 0.0]
    assert tasks.Feedback(length=2).reward(task, said("zz")).hint == f"The answer is {right}."
    turns = tasks.FirstTurn(length=2).reward(task, said(right[0] + "z", "anything")).turns
    assert turns == [0.5, 0.0]
    answers = [said(right), said(right[0] + "z"), said("zz")]
    assert [found["judge"] for found in tasks.Ranked(length=2).reward_group(task, answers)] == [1.0, 0.5, 0.0]
    assert [found["judge"] for found in tasks.Constant(length=2).reward_group(task, answers)] == [1.0] * 3
    any_of = tasks.AnyOf(length=2)
    assert sorted(any_of.reward(task, said(letter * 2)) for letter in tasks.LETTERS) == [0.0] * 4 + [1.0] * 4
