"""`shoal grpo --layout split`: one command starts three processes, and none of them remains."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from .helpers.processes import Command, WarmPython, alive, children_of, rank_of, start_fresh, wait_until
from .helpers.runs import Run, assert_trained_once, base_config
from .helpers.split import COMPONENTS, compared

STEPS = 4
LIMIT_S = 90.0


def one_file(folder: Path, warm: WarmPython, model: Path, steps: int = STEPS) -> Run:
    """A run as written for one process, without keys of the split layout."""
    config = base_config(model)
    config["train"]["max_steps"] = steps
    config["orch"]["batch_size"] = 8
    return Run(folder, warm).write(config)


def start(run: Run, *arguments: str) -> Command:
    return start_fresh(["grpo", "run.yaml", "--layout", "split", *arguments], run.folder)


def start_forked(run: Run, *arguments: str, restarts: int = 0, ranks: int = 0) -> Command:
    """For tests that are not about starting: the processes, restarted ones and training ranks are forked as well."""
    return run.start("--layout", "split", *arguments, spares=(len(COMPONENTS) + restarts, ranks))


def pids_of(run: Run) -> dict[str, int]:
    files = {name: run.path / "handshake" / f"{name}.json" for name in COMPONENTS}
    return {name: json.loads(file.read_text())["pid"] for name, file in files.items()}


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def wait_for_step(run: Run, command: Command, step: int) -> None:
    journal = run.path / "journal.jsonl"

    def there() -> bool:
        assert command.running(), command.text()[-3000:]
        return journal.exists() and len(journal.read_text().splitlines()) >= step

    wait_until(there, LIMIT_S, f"step {step}: {command.text()[-3000:]}", 0.01)


def test_crashed_processes_restart_and_the_run_is_identical(tmp_path: Path, warm: WarmPython, model: Path):
    """Trainer and orchestrator are killed once each, and the supervisor restarts them."""
    whole = one_file(tmp_path / "whole", warm, model)
    assert whole.grpo().wait() == 0
    run = one_file(tmp_path / "split", warm, model)
    command = start_forked(run, restarts=2)
    wait_for_step(run, command, 1)
    os.kill(pids_of(run)["train"], signal.SIGKILL)
    wait_for_step(run, command, 3)
    os.kill(pids_of(run)["orch"], signal.SIGKILL)
    assert command.wait(LIMIT_S) == 0, command.text()[-3000:]
    assert_trained_once(run, STEPS)
    assert compared(run) == compared(whole)
    assert "grpo-train ended by signal 9; it is restarted (1 of 3)" in command.text()
    assert not children_of(command.pid)


def test_one_of_several_training_processes_is_killed(tmp_path: Path, warm: WarmPython, model: Path):
    """`train.gpus: 2`: the trainer starts its ranks, ends with them, and is restarted like any trainer."""
    whole = one_file(tmp_path / "whole", warm, model)
    assert whole.grpo().wait() == 0
    run = one_file(tmp_path / "split", warm, model)
    command = start_forked(run, "train.gpus=2", "train.device=cpu", "train.sharding=fsdp", restarts=1, ranks=2)
    wait_for_step(run, command, 2)
    first = pids_of(run)["train"]
    second = next(pid for pid in children_of(command.pid) if rank_of(pid) == 1)
    assert rank_of(first) == 0, "the first rank takes part in the run"
    os.kill(second, signal.SIGKILL)
    assert command.wait(2 * LIMIT_S) == 0, command.text()[-3000:]
    assert_trained_once(run, STEPS)
    assert "rank 1 of 2 was killed by SIGKILL" in (run.path / "logs" / "train.out").read_text()
    assert "grpo-train ended by exit code 70; it is restarted (1 of 3)" in command.text()
    assert not children_of(command.pid)
    for ours, theirs in zip(run.metrics(), whole.metrics(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def test_killed_supervisor_leaves_no_processes(tmp_path: Path, warm: WarmPython, model: Path):
    run = one_file(tmp_path, warm, model, steps=1000)
    command = start(run, "train.lora=true", "train.lora_rank=4")  # the server is started with adapters enabled
    wait_for_step(run, command, 1)
    below, pids = children_of(command.pid), pids_of(run)
    assert loads_torch(pids["train"]) and loads_torch(pids["infer"]) and not loads_torch(pids["orch"])
    assert {*pids.values()} <= {*below} and len(below) > 3, "reward workers are children of the orchestrator"
    command.kill()
    wait_until(lambda: not any(alive(pid) for pid in below), 5, "the end of all children", 0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signal_saves_and_ends_all_three(tmp_path: Path, warm: WarmPython, model: Path, number: signal.Signals):
    run = one_file(tmp_path, warm, model, steps=1000 if number == signal.SIGINT else 6)
    command = start_forked(run)
    wait_for_step(run, command, 1)
    below = children_of(command.pid)
    command.send(number)
    assert command.wait(LIMIT_S) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], command.text()[-3000:]
    assert not any(alive(pid) for pid in below)
    status = run.status()
    assert status["state"] == "interrupted" and status["resumable"]
    saved = run.checkpoints()[-1]
    assert saved == len(run.journal()), "the state after the last step is saved"
    words = shlex.split(status["next_command"])
    assert words[:2] == ["shoal", "grpo"] and words[-3:] == ["--layout", "split", "--resume"]
    if number == signal.SIGTERM:
        again = warm.start(words[1:], run.folder, spares=len(COMPONENTS))
        assert again.wait(LIMIT_S) == 0, again.text()[-3000:]
        assert_trained_once(run, 6)


def test_contradictions_are_reported_before_start(tmp_path: Path, warm: WarmPython, model: Path):
    run = one_file(tmp_path, warm, model)
    command = warm.run(["grpo", "run.yaml", "train.max_steps=4", "orch.max_steps=9", "--layout", "split"], run.folder)
    assert command.wait() == 2
    assert "orch.max_steps: is 9 but train.max_steps is 4" in command.text()
    assert not run.path.exists()


def test_taken_port_ends_all_three(tmp_path: Path, warm: WarmPython, model: Path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = one_file(tmp_path, warm, model)
        command = start_forked(run, f"infer.port={taken.getsockname()[1]}")
        assert command.wait(LIMIT_S) == 2, command.text()[-3000:]
    assert "infer.port" in command.text()
    assert not children_of(command.pid)
