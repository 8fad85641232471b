"""Stopping and restarting: signals, finished runs, refusals, locks, damaged checkpoints, exit codes."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import WarmPython, alive, children_of, wait_until
from .helpers.runs import Run, assert_same_run, assert_trained_once, fingerprint, hash_of, wait_for_steps

STOPPING = "stopping at the next safe point, with the state saved; a second signal ends it at once"
NewRun = Callable[..., Run]
SLOW = {"batch_size": 8, "reward": {"function": "my_code:slow_reward"}}


def contents(run: Run) -> dict[str, str]:
    """Hashes of all files that describe the history of a run."""
    files = [file for file in run.path.rglob("*") if file.is_file() and "logs" not in file.parts]
    return {str(file.relative_to(run.path)): hash_of(file) for file in files if file.name != "run.lock"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, warm: WarmPython, model: Path) -> Run:
    """A finished run of four steps. Tests that change it use a copy."""
    from .helpers.runs import base_config

    run = Run(tmp_path_factory.mktemp("finished"), warm).write(base_config(model))
    command = run.grpo()
    assert command.wait() == 0, command.text()
    return run


@pytest.fixture
def copy_of_finished(finished: Run, tmp_path: Path) -> Run:
    shutil.copytree(finished.folder, tmp_path / "copy")
    return Run(tmp_path / "copy", finished.warm)


def test_reward_that_fails_everywhere_ends_the_run_in_step_1(new_run: NewRun):
    run = new_run("broken", orch={"reward": {"function": "my_code:always_broken_reward"}, "groups": {"max_refill": 0}})
    command = run.grpo()
    assert command.wait() == 3, command.text()
    text = command.text()
    assert "Traceback" not in text.split("every rollout of step 1")[0]
    assert "shoal: error: the reward failed on every rollout of step 1" in text, "one error, not one per line"
    assert (
        "KeyError: 'the key'" in text and "line" in text and "in always_broken_reward" in text and "in lookup" in text
    )
    assert "reward_server" not in text and "rewards/worker.py" not in text
    (record,) = run.journal()
    assert record["rollout_ids"] == [] and not (run.path / "final").exists()


@pytest.mark.parametrize("reward", ["judge", "relative-judge"])
def test_unreachable_judge_is_one_message(new_run: NewRun, reward: str):
    judge = {"url": "http://127.0.0.1:9/v1/chat/completions", "model": "judge", "retries": 0}
    rows = [{"prompt": f"What is {number} plus one?"} for number in range(8)]
    env = [{"id": "dataset", "args": {"reward": reward, "judge": judge}}]
    run = new_run("unreachable", orch={"env": env, "dataset": {"path": "rows.jsonl"}, "groups": {"max_refill": 0}})
    (run.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = run.grpo()
    assert command.wait() == 3, command.text()
    *_, last = command.text().splitlines()
    assert last.startswith("shoal: error: ") and judge["url"] in last and "cannot be reached" in last
    assert "http_judge.py" not in command.text() and 'File "' not in command.text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_the_next_command_continues(new_run: NewRun, number: int, code: int):
    whole = new_run("whole", orch=SLOW)
    running = whole.start()
    run = new_run("cut", orch=SLOW)
    command = run.start()
    wait_for_steps(run, 2, command)
    command.send(number)
    assert command.wait(30) == code, command.text()
    status = run.status()
    assert status["state"] == "interrupted" and status["resumable"] and "saved" in status["reason"]
    assert status["step"] == len(run.journal()) == run.checkpoints()[-1] >= 2
    assert not (run.path / "final").exists()
    assert f"to continue: {status['next_command']}" in command.text()
    program, *arguments = shlex.split(status["next_command"])
    assert program == "shoal" and "--resume" in arguments
    resumed = run.warm.run(arguments, run.folder)
    assert resumed.wait() == 0, resumed.text()
    assert run.status()["state"] == "finished" and run.status()["next_command"] is None
    assert len(run.events("resume")) == 1
    parts = {"load", "memory", "sampler"}
    starts = [set(event["data"]["seconds"]) for event in run.events("ready")]
    assert starts == [parts, parts | {"checkpoint"}], "the duration of each start"
    assert f", continuing after step {status['step']}" in resumed.text()
    assert running.wait() == 0
    assert_trained_once(run, 4)
    assert_same_run(run, fingerprint(whole))


def test_second_signal_ends_the_run_at_once(new_run: NewRun):
    """The first signal waits for the step, whose training hangs. The second does not wait, and no process remains."""
    run = new_run(train={"loss": {"type": "my_code:hanging_loss"}})
    command = run.start()
    wait_until(lambda: len(children_of(command.pid)) >= 2 or not command.running(), 60, "the reward workers")
    time.sleep(1.0)
    children = children_of(command.pid)
    command.send(signal.SIGINT)
    wait_until(lambda: STOPPING in command.text() or not command.running(), 30, "a word of it")
    assert command.running(), command.text()
    started = time.monotonic()
    command.send(signal.SIGINT)
    assert command.wait(10) == 130 and time.monotonic() - started < 3
    wait_until(lambda: not any(alive(pid) for pid in children), 5, "the end of the reward workers")
    status = run.status()
    assert status["state"] == "interrupted" and status["resumable"] and "second signal" in status["reason"]
    assert "no checkpoint yet" in status["reason"] and not run.checkpoints()
    assert command.text().endswith(f"\nshoal: {status['reason']}; to continue: {status['next_command']}\n")
    resumed = run.grpo("--resume", kill_at=("written:status.json", 1))
    assert resumed.wait() == -9, "the folder is free, and contains the run"


def test_signal_interrupts_an_evaluation(new_run: NewRun):
    reward = {"function": "my_code:hanging_reward", "timeout_s": 120}
    run = new_run(orch={"reward": reward, "eval": {"num_examples": 2, "interval": 2}})
    command = run.start()
    wait_until(lambda: len(children_of(command.pid)) >= 2 or not command.running(), 60, "the reward workers")
    time.sleep(0.5)
    command.send(signal.SIGINT)
    assert command.wait(20) == 130, command.text()
    assert run.status()["state"] == "interrupted" and run.status()["resumable"]


def test_interrupted_supervised_training_continues(warm: WarmPython, raw_model: Path, tasks_file: Path, tmp_path: Path):
    run = Run(tmp_path, warm)
    flags = ["--model", str(raw_model), "--dataset", str(tasks_file), "--output-dir", "out", "--max-steps", "40"]
    command = warm.start(["sft", *flags, "train.save_steps=1000"], tmp_path)
    wait_for_steps(run, 3, command)
    command.send(signal.SIGINT)
    assert command.wait(30) == 130 and command.text().count(STOPPING) == 1, command.text()
    status = run.status()
    assert status["state"] == "interrupted" and run.checkpoints() == [status["step"]]
    program, *arguments = shlex.split(status["next_command"])
    assert (program, arguments[0]) == ("shoal", "sft")
    resumed = warm.run(arguments, tmp_path)
    assert resumed.wait() == 0, resumed.text()
    assert [record["step"] for record in run.journal()] == list(range(1, 41))
    assert run.status()["state"] == "finished"


def test_signal_lets_the_final_export_complete(
    new_run: NewRun, warm: WarmPython, raw_model: Path, tasks_file: Path, tmp_path: Path
):
    """Nothing is left to stop or to load: the run is finished, not interrupted."""
    at_the_second_folder = [("folder:synced", 2, "kill", signal.SIGINT)]  # after the checkpoint
    rows = ["--model", str(raw_model), "--dataset", str(tasks_file), "--output-dir", "out", "--max-steps", "2"]
    grpo = new_run(train={"max_steps": 2})
    for run, words in ((grpo, ["grpo", "run.yaml"]), (Run(tmp_path, warm), ["sft", *rows])):
        command = warm.start(words, run.folder, faults=at_the_second_folder)
        assert command.wait() == 0 and STOPPING in command.text(), command.text()
        assert run.status()["state"] == "finished" and (run.path / "final" / "config.json").is_file()


def test_closed_pipe_does_not_end_the_run(new_run: NewRun, tmp_path: Path):
    """As in `shoal grpo run.yaml | head -1`: the reader is gone, and training continues."""
    run = new_run()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command = run.start(output=pipe)
    wait_until(lambda: select.select([reader], [], [], 0)[0], 60, "the first line")
    os.close(reader)
    assert command.wait() == 0
    assert_trained_once(run, 4)
    assert run.status()["state"] == "finished"


def test_resuming_a_finished_run_says_so_and_changes_nothing(finished: Run):
    before = contents(finished)
    command = finished.grpo("--resume")
    assert command.wait() == 0
    assert "finished at step 4" in command.text() and "nothing is left to do" in command.text()
    assert contents(finished) == before


@pytest.mark.parametrize("file", ("README.md", "report.html"))
def test_resuming_a_run_that_was_killed_while_it_wrote_its_report(new_run: NewRun, file: str):
    run = new_run(train={"max_steps": 2})
    command = run.start(kill_at=(f"written:{file}", 1))
    assert command.wait() == -signal.SIGKILL and run.status()["state"] == "finished"
    assert run.grpo("--resume").wait() == 0
    assert (run.path / "report.html").is_file() and (run.path / "final" / "README.md").is_file()
    assert not list(run.path.rglob(".tmp-*"))


def test_used_directory_is_refused_without_resume(finished: Run):
    before = contents(finished)
    command = finished.grpo()
    assert command.wait() == 2
    assert "already holds a run" in command.text() and "--resume" in command.text()
    assert contents(finished) == before


def test_more_steps_continue_a_finished_run(copy_of_finished: Run):
    run = copy_of_finished
    before = run.metrics()
    weights = hash_of(run.path / "final" / "model.safetensors")
    command = run.grpo("--resume", "train.max_steps=6", "train.learning_rate=1e-4")
    assert command.wait() == 0, command.text()
    assert "train.max_steps: 4 → 6" in command.text() and "learning_rate" in command.text()
    assert_trained_once(run, 6)
    assert run.metrics()[: len(before)] == before
    assert [step["optim/lr"] for step in run.steps()] == [2e-4] * 4 + [1e-4] * 2
    assert run.status()["step"] == 6 and hash_of(run.path / "final" / "model.safetensors") != weights


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("train.seed=7", "train.seed"),
        ("train.model={raw}", "train.model"),
        ("orch.env=[{{id: arithmetic}}]", "orch.env"),
        ("orch.sampling.temperature=0.5", "orch.sampling.temperature"),
        ("orch.batch_size=32", "orch.batch_size"),
        ("train.loss={{type: dapo}}", "train.loss.type"),
        ("train.lora=true", "train.lora"),
    ],
)
def test_other_run_in_the_folder_is_refused(finished: Run, raw_model: Path, change: str, names: str):
    before = contents(finished)
    command = finished.grpo("--resume", "train.max_steps=6", change.format(raw=raw_model))
    assert command.wait() == 2, command.text()
    assert names in command.text() and "resume" in command.text()
    assert contents(finished) == before


def test_changed_data_cannot_be_continued(new_run: NewRun):
    """The same name with other rows: the fingerprint of the data differs."""
    run = new_run(orch={"env": [{"id": "dataset"}], "dataset": {"path": "rows"}}, train={"max_steps": 2})
    (run.folder / "rows").mkdir()
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(9)]
    file = run.folder / "rows" / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = run.grpo()
    assert first.wait() in (0, 3), first.text()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    second = run.grpo("--resume", "train.max_steps=9")
    assert second.wait() == 2 and "data" in second.text(), second.text()


def test_resume_with_another_model_is_refused(new_run: NewRun, model: Path, raw_model: Path):
    """The same folder with other weights: a base or reference that is read from it again would differ."""
    run = new_run(train={"model": "model", "lora": True, "max_steps": 2})
    shutil.copytree(model, run.folder / "model")
    assert run.grpo().wait() == 0
    shutil.copy(raw_model / "model.safetensors", run.folder / "model")
    before = contents(run)
    second = run.grpo("--resume", "train.max_steps=3")
    assert second.wait() == 2 and "the files of the model have changed" in second.text(), second.text()
    assert contents(run) == before
    shutil.copy(model / "model.safetensors", run.folder / "model")
    assert run.grpo("--resume", "train.max_steps=3").wait() == 0


def test_locked_directory_names_the_holder(new_run: NewRun):
    run = new_run(train={"max_steps": 500}, orch=SLOW)
    holder = run.start()
    wait_for_steps(run, 1, holder)
    assert run.status()["state"] == "running"
    other = run.grpo("--resume")
    assert other.wait() == 5, other.text()
    assert f"process {holder.pid}" in other.text()
    steps = len(run.journal())
    wait_for_steps(run, steps + 2, holder)
    holder.kill()
    assert run.grpo("--resume", f"train.max_steps={len(run.journal())}").wait() == 0, "the lock ended with its holder"


def test_resumed_run_says_that_it_is_running(copy_of_finished: Run):
    run = copy_of_finished
    command = run.start("--resume", "train.max_steps=500")
    wait_for_steps(run, 5, command)
    assert run.status()["state"] == "running" and run.status()["resumable"]
    command.kill()
    command = run.grpo("--resume", "train.max_steps=500", kill_at=("appended:journal.jsonl", 1))
    assert command.wait() == -9, "a killed run is not mistaken for the earlier finished one"


def damage_flip(checkpoint: Path) -> None:
    file = checkpoint / "trainer.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def damage_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [damage_flip, damage_manifest])
def test_damaged_checkpoint_is_skipped(copy_of_finished: Run, damage: Callable[[Path], None]):
    run = copy_of_finished
    before: list[dict[str, Any]] = run.metrics()
    assert run.checkpoints() == [2, 4]
    damage(run.path / "checkpoints" / "step_000004")
    command = run.grpo("--resume", "train.max_steps=5")
    assert command.wait() == 0, command.text()
    (event,) = run.events("checkpoint")
    assert "step_000004" in event["message"] and "passed over" in event["message"]
    assert [event["step"] for event in run.events("resume")] == [2]
    assert_trained_once(run, 5)
    assert run.metrics()[:4] == before, "steps 3 and 4 were computed again with equal results"


def test_without_a_good_checkpoint_it_is_a_storage_error(copy_of_finished: Run):
    run = copy_of_finished
    for step in run.checkpoints():
        damage_flip(run.path / "checkpoints" / f"step_{step:06d}")
    journal = run.journal()
    command = run.grpo("--resume", "train.max_steps=5")
    assert command.wait() == 4, command.text()
    assert "no undamaged checkpoint" in command.text()
    assert run.journal() == journal, "nothing was deleted"
