"""Failures inside a run: nan gradients, failing rewards, zero-variance groups, orphaned processes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import alive, children_of, wait_until
from .helpers.runs import REVERSE_ARGS, Run, assert_same_run, assert_trained_once, fingerprint

NewRun = Callable[..., Run]


def weights(folder: Path) -> dict:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def test_nonfinite_gradients_stop_the_run_with_a_checkpoint(new_run: NewRun, model: Path):
    run = new_run(train={"max_steps": 9, "save_steps": 50, "loss": {"type": "my_code:nan_loss"}})
    command = run.grpo()
    assert command.wait() == 3, command.text()
    assert "3 steps in a row with non-finite gradients" in command.text()
    assert [step["optim/skipped"] for step in run.steps()] == [1, 1, 1]
    assert all("optim/grad_norm" not in step and step["policy/loss"] == "nan" for step in run.steps())
    assert [event["step"] for event in run.events("non-finite")] == [1, 2, 3]
    status = run.status()
    assert status["state"] == "stopped" and status["resumable"] and status["step"] == 3
    assert run.checkpoints() == [3] and not (run.path / "final").exists()
    saved, start = weights(run.path / "checkpoints" / "step_000003" / "weights"), weights(model)
    assert all((saved[name] == start[name]).all() for name in start), "no weight changed"


def test_one_nonfinite_gradient_is_skipped_and_counted(new_run: NewRun):
    """The arguments reach the user's loss, which fails only at its third call."""
    loss = {"type": "my_code:nan_loss", "args": {"at": [3]}}
    run = new_run(train={"loss": loss, "sequence_len": 512})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert sum(step["optim/skipped"] for step in run.steps()) == 1
    (event,) = run.events("non-finite")
    assert next(step["step"] for step in run.steps() if step["optim/skipped"]) == event["step"]
    final = weights(run.path / "final")
    assert all(abs(tensor).max() < 100 for tensor in final.values()), "all of them finite"


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("orch", {"groups": {"filter": "my_code:raises"}}, "my_code:raises raised KeyError: 'nothing here'"),
        ("orch", {"advantage": "my_code:raises"}, "my_code:raises raised KeyError"),
        ("orch", {"advantage": "my_code:one_number"}, "advantage my_code:one_number returned float"),
        ("train", {"loss": {"type": "my_code:one_number"}}, "loss my_code:one_number returned float"),
    ],
    ids=["filter", "advantage", "advantage-shape", "loss-shape"],
)
def test_errors_of_user_code_are_reported_as_such(new_run: NewRun, section: str, values: dict[str, Any], says: str):
    """Exit code 3 with the name of the function. After a fix, the run resumes."""
    run = new_run(**{section: values})
    command = run.grpo()
    assert command.wait() == 3, command.text()
    assert says in command.text() and "a bug in Shoal" not in command.text() and "Traceback" not in command.text()
    assert run.status()["state"] == "stopped" and run.status()["resumable"] and run.journal() == []


def test_rewards_that_fail_exclude_their_rollouts_and_training_continues(new_run: NewRun):
    env = [{"id": "reverse-text", "args": {**REVERSE_ARGS, "num_train": 60}}]
    reward = {"function": "my_code:flaky_reward", "timeout_s": 0.3, "workers": 4}
    run = new_run(orch={"env": env, "reward": reward, "batch_size": 24})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 4)
    rollouts = run.rollouts()
    statuses = Counter(rollout["status"] for rollout in rollouts)
    assert {"ok", "error", "timeout", "excluded"} <= set(statuses), statuses
    for rollout in rollouts:
        assert (rollout["reward"] is not None) == (rollout["status"] == "ok")
        assert rollout["status"] not in ("error", "timeout") or rollout["error"]
    errors = {rollout["error"].split(":")[0] for rollout in rollouts if rollout["status"] == "error"}
    assert any("ValueError" in error for error in errors) and any("ended its process" in error for error in errors)
    trained = {rollout_id for record in run.journal() for rollout_id in record["rollout_ids"]}
    assert trained == {r["rollout_id"] for r in rollouts if r["status"] == "ok" and r["drop_reason"] is None}
    for step in run.steps():
        of_step = [rollout["status"] for rollout in rollouts if rollout["step"] == step["step"]]
        assert step["reward/error_frac"] == of_step.count("error") / len(of_step)
        assert step["reward/timeout_frac"] == of_step.count("timeout") / len(of_step)
    dropped = {reason for record in run.journal() for reason in record["dropped"].values()}
    assert "too-few-scored" in dropped


def test_solved_prompts_end_the_run_successfully(new_run: NewRun):
    run = new_run(train={"max_steps": 9}, orch={"env": [{"id": "my_code:Solved"}], "groups": {"max_refill": 0}})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    status = run.status()
    assert status["state"] == "solved" and status["step"] == 5 and not status["resumable"]
    assert "the unchanged weights, because no step trained anything, are in out/final" in command.text()
    assert (run.path / "final" / "model.safetensors").exists()
    assert [record["rollout_ids"] for record in run.journal()] == [[]] * 5, "steps without training are recorded"
    assert len(run.events("flat")) == 5
    again = run.grpo("--resume")
    assert again.wait() == 0 and "solved at step 5" in again.text(), again.text()
    assert len(run.journal()) == 5


def test_unsolved_prompts_stop_the_run(new_run: NewRun):
    env = [{"id": "my_code:Solved", "args": {"right": False}}]
    run = new_run(train={"max_steps": 9}, orch={"env": env, "groups": {"max_refill": 0}})
    command = run.grpo()
    assert command.wait() == 3, command.text()
    assert "5 steps in a row that trained nothing (all groups: zero-variance group (all bad))" in command.text()
    assert run.status()["state"] == "stopped" and run.checkpoints()[-1] == 5


def test_killed_run_leaves_no_process_behind(new_run: NewRun):
    """Rewards hang in worker processes. If the parent is killed, they end within five seconds."""
    run = new_run(orch={"reward": {"function": "my_code:hanging_reward", "timeout_s": 300, "workers": 3}})
    command = run.start()
    # the server and its three workers, all busy
    wait_until(lambda: len(children_of(command.pid)) >= 4 or not command.running(), 60, "the reward workers")
    children = children_of(command.pid)
    command.send(signal.SIGKILL)
    started = time.monotonic()
    wait_until(lambda: not any(alive(pid) for pid in children), 5, "the end of the reward workers")
    assert time.monotonic() - started < 5 and command.wait(5) == -9


def test_killed_reward_server_stops_the_run_with_its_state_saved(new_run: NewRun):
    """Without a reward server nothing can be scored. No prompt is lost; a resumed run equals the undisturbed one."""
    slow = {"batch_size": 8, "reward": {"function": "my_code:slow_reward"}}
    whole, run = new_run("whole", orch=slow), new_run("cut", orch=slow)
    undisturbed, command = whole.start(), run.start()
    wait_until(lambda: (run.path / "journal.jsonl").exists() and run.journal(), 60, "the first step")
    os.kill(children_of(command.pid)[0], signal.SIGKILL)
    assert command.wait(30) == 3, command.text()
    assert "the reward server ended (killed by SIGKILL)" in run.status()["reason"]
    assert run.checkpoints()[-1] == len(run.journal()) and not run.events("flat")
    resumed = run.grpo("--resume")
    assert resumed.wait() == 0, resumed.text()
    assert undisturbed.wait() == 0
    assert_same_run(run, fingerprint(whole))


def test_wait_past_the_deadline_stops_the_run(new_run: NewRun):
    run = new_run(orch={"reward": {"function": "my_code:hanging_reward", "timeout_s": 300}, "deadline_s": 1.0})
    command = run.grpo()
    assert command.wait() == 3, command.text()
    assert "the loop waited 1 s for 4 groups (reverse-text/" in command.text()
    assert "never retrieved" not in command.text() and "Traceback" not in command.text()
    assert run.status()["state"] == "stopped" and run.status()["resumable"]


def test_unsupported_hardware_is_refused_and_the_folder_stays_free(new_run: NewRun):
    """Exit code 2 with a setting that works. With this setting, the same command runs."""
    run = new_run(train={"recipe": "fp8-hybrid"})
    command = run.grpo()
    assert command.wait() == 2, command.text()
    assert "train.recipe: fp8-hybrid" in command.text() and "train.recipe=fp32" in command.text()
    assert not (run.path / "status.json").exists()
    command = run.grpo("train.recipe=fp32")
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 4)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_gpu_memory_share_applies_to_free_memory_on_a_cpu(
    new_run: NewRun, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = new_run(train={"max_steps": 1, "device": device}, infer={"gpu_memory_utilization": 0.5})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    said = "infer.gpu_memory_utilization: on a CPU, the KV cache may take 0.5 of the free memory"
    assert command.text().count(said) == 1


def test_always_failing_rewards_fail_the_run(new_run: NewRun):
    """The run ends after its first step with an error."""
    run = new_run(train={"max_steps": 2}, orch={"reward": {"function": "my_code:broken_reward"}})
    command = run.grpo()
    assert command.wait() == 3, command.text()
    told = [line for line in command.text().splitlines() if "no reward for" in line]
    assert len(told) == 1, "reported once, although every message quotes another answer"
    assert "step 1: no reward for 64 of 64 rollouts of reverse-text: KeyError:" in told[0]
    assert "my_code.py:" in told[0] and "in broken_reward)" in told[0]
    assert "every rollout of step 1 (reverse-text: KeyError" in command.text()
    assert run.status()["state"] == "stopped" and not (run.path / "final").exists()


def test_environment_without_a_reward_is_refused_at_once(new_run: NewRun):
    run = new_run(orch={"env": [{"id": "my_code:NoJudge"}]})
    command = run.grpo()
    assert command.wait() == 2, command.text()
    assert "NoJudge has no method reward(self, task, messages); write one, or name a function" in command.text()
    assert not run.path.exists() or not list(run.path.iterdir())


def test_reward_that_kills_its_server_costs_one_rollout(new_run: NewRun):
    """The keeper, which the reward suspended as well, forks another server. Queued rollouts are scored."""
    run = new_run(orch={"reward": {"function": "my_code:server_killing_reward", "workers": 1}})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    statuses = Counter(rollout["status"] for rollout in run.rollouts())
    assert statuses["error"] == 1 and set(statuses) == {"ok", "error"}
