"""Signals at special moments: while a model loads, in an evaluation, ignored signals, and suspension."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .helpers.processes import Command, WarmPython, alive, children_of, environment, wait_until
from .helpers.runs import Run, assert_same_run, assert_trained_once, fingerprint, wait_for_steps

NewRun = Callable[..., Run]
SLOW = {"batch_size": 8, "reward": {"function": "my_code:slow_reward"}}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)], ids=["INT", "TERM", "HUP"]
)
def test_signal_while_the_model_loads(new_run: NewRun, number: int, code: int):
    """A scheduler that ends the process does not leave a run with the status running."""
    run = new_run(train={"max_steps": 2})
    command = run.start()
    wait_until(lambda: "loading" in command.text() or not command.running(), 60, "the model to load")
    children = children_of(command.pid)
    command.send(number)
    assert command.wait(30) == code, command.text()
    status = run.status()
    assert (status["state"], status["resumable"]) == ("interrupted", True)
    assert "while it was loading" in status["reason"]
    assert command.text().endswith(f"{status['reason']}; to continue: {status['next_command']}\n")
    assert signal.Signals(number).name in status["reason"] and status["next_command"].endswith("--resume")
    wait_until(lambda: not any(alive(pid) for pid in children), 5, "the end of the reward workers")
    assert run.grpo("--resume").wait() == 0
    assert_trained_once(run, 2)


def test_standalone_evaluation_has_a_load_deadline(new_run: NewRun, model: Path):
    """Loading is one long call in the thread of the event loop, which handles signals only afterwards."""
    run = new_run()
    reached, go = run.folder / "loading", run.folder / "go"
    (run.folder / "slow_model.py").write_text(
        "import pathlib, sys, time\nimport shoal.build.evaluate as evaluation\nfrom shoal.cli.entry import main\n\n\n"
        "def load(*_):\n    pathlib.Path('loading').touch()\n    deadline = time.monotonic() + 60\n"
        "    while not pathlib.Path('go').exists() and time.monotonic() < deadline:\n        time.sleep(0.01)\n"
        "    raise SystemExit(1)\n\n\nevaluation.load_model = load\nsys.exit(main(sys.argv[1:]))\n"
    )
    process = run.warm.start(["slow_model.py", "eval", str(model), "--env", "arithmetic"], run.folder, python=True)
    try:
        wait_until(lambda: reached.exists() or not process.running(), 60, "the model to load")
        process.send(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        go.touch()
        process.kill()
    assert process.text().endswith("shoal: error: ended by SIGINT\n")


def test_standalone_evaluation_has_a_device_deadline(warm: WarmPython, model: Path, tmp_path: Path):
    """A step of a large model on a CPU takes long. There is nothing to save, so the command ends at once."""
    reached = tmp_path / "drawing"
    words = ["eval", str(model), "--env", "arithmetic", "--num-examples", "4", "--max-tokens", "8"]
    command = warm.start(words, tmp_path, faults=[("engine:turn", 1, "hang", str(reached))])
    wait_until(lambda: reached.exists() or not command.running(), 60, "the first turn of the engine")
    children = children_of(command.pid)
    assert children, "the reward workers"
    started = time.monotonic()
    command.send(signal.SIGINT)
    assert command.wait(20) == 130 and time.monotonic() - started < 5, command.text()
    assert command.text().endswith("shoal: error: ended by SIGINT\n")
    wait_until(lambda: not any(alive(pid) for pid in children), 5, "the end of the reward workers")


def test_evaluation_runs_in_the_background(new_run: NewRun):
    """The trained step is recorded and saved. Its evaluation is made after the resume, with the same result."""
    evaluated = {
        "orch": {"eval": {"num_examples": 3, "interval": 2}, "reward": {"function": "my_code:patient_with_held_out"}}
    }
    whole = new_run("whole", **evaluated)
    (whole.folder / "go").touch()
    undisturbed = whole.start()
    run = new_run("cut", train={"save_steps": 50}, **evaluated)
    (run.folder / "go").touch()
    command = run.start()
    wait_for_steps(run, 1, command)
    (run.folder / "go").unlink()
    wait_until(lambda: (run.folder / "evaluating").exists() or not command.running(), 60, "the evaluation of step 2")
    command.send(signal.SIGINT)
    started = time.monotonic()
    assert command.wait(30) == 130, command.text()
    assert time.monotonic() - started < 20
    assert run.status()["step"] == len(run.journal()) == run.checkpoints()[-1] == 2
    assert not any(name.startswith("eval/") for name in run.metrics()[-1])
    (run.folder / "go").touch()
    resumed = run.grpo("--resume")
    assert resumed.wait() == 0, resumed.text()
    assert undisturbed.wait() == 0
    assert_trained_once(run, 4)
    assert_same_run(run, fingerprint(whole))


def test_ignored_sighup_stays_ignored(new_run: NewRun):
    """As with `nohup shoal grpo …`: the terminal closes and the run continues."""
    run = new_run(orch=SLOW)
    output = run.folder / "nohup.txt"
    arguments = [sys.executable, "-m", "shoal", "grpo", "run.yaml"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *arguments], cwd=run.folder, env=environment(), stdout=file,
            stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    command = Command(process.pid, output, process.poll)
    wait_for_steps(run, 1, command)
    command.send(signal.SIGHUP)
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 4)


def test_sighup_saves(new_run: NewRun):
    run = new_run(orch=SLOW)
    command = run.start()
    wait_for_steps(run, 1, command)
    command.send(signal.SIGHUP)
    assert command.wait(30) == 143, command.text()
    assert run.status()["state"] == "interrupted" and run.checkpoints()[-1] == run.status()["step"] >= 1


def test_process_suspended_for_a_while(new_run: NewRun):
    """Longer than any deadline of the run: a suspended process does not count as hanging."""
    short = {"deadline_s": 3.0, "reward": {"function": "my_code:slow_reward", "timeout_s": 2.0}, "batch_size": 8}
    whole = new_run("whole", orch=short)
    undisturbed = whole.start()
    run = new_run("stopped", orch=short)
    command = run.start()
    wait_for_steps(run, 1, command)
    everyone = [command.pid, *children_of(command.pid)]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    assert command.wait() == 0, command.text()
    assert undisturbed.wait() == 0, undisturbed.text()
    assert_same_run(run, fingerprint(whole))
    assert not run.events("stall"), "no warning"


def test_reward_server_suspended_for_a_while(new_run: NewRun, tmp_path: Path):
    run = new_run(orch=SLOW)
    command = run.start()
    wait_for_steps(run, 1, command)
    keeper = children_of(command.pid)[0]
    server = children_of(keeper)[0]
    os.kill(server, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(server, signal.SIGCONT)
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 4)
    assert {rollout["status"] for rollout in run.rollouts()} == {"ok"}
