"""A run whose rewards execute code of the model, or the message why this machine cannot isolate it."""

from __future__ import annotations

from collections.abc import Callable

from shoal.rewards.isolation import needed_files, why_not

from .helpers.runs import Run, assert_trained_once


def test_run_with_isolated_rewards(new_run: Callable[..., Run]):
    run = new_run(orch={"reward": {"isolated": True}})
    command = run.grpo()
    reason = why_not(needed_files())
    if reason is not None:
        assert command.wait() == 2, command.text()
        assert "orch.reward.isolated: " in command.text() and reason in command.text()
        assert not (run.path / "status.json").exists()
        return
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 4)
    assert {rollout["status"] for rollout in run.rollouts()} == {"ok"}
