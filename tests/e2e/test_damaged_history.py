"""Real runs whose records were damaged after the end: a resume repairs them or reports the loss."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .helpers.processes import WarmPython
from .helpers.runs import Run, assert_same_run, base_config, fingerprint


@pytest.fixture(scope="module")
def trained(warm: WarmPython, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = base_config(model)
    config["train"]["max_steps"] = 3
    config["orch"]["batch_size"] = 8
    run = Run(tmp_path_factory.mktemp("trained"), warm).write(config)
    assert run.grpo().wait() == 0
    return run


@pytest.fixture
def copied(trained: Run, tmp_path: Path) -> Callable[[], Run]:
    return lambda: Run(Path(shutil.copytree(trained.folder, tmp_path / "run")), trained.warm)


def test_damaged_records_and_status_are_repaired(trained: Run, copied: Callable[[], Run]):
    run = copied()
    shutil.rmtree(run.path / "final")
    journal = (run.path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "journal.jsonl").write_bytes(journal[2] + journal[0] + journal[0])
    metrics = (run.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_bytes(b"".join(metrics[1:]).replace(b"reward/mean", b"reward/meen"))
    (run.path / "status.json").write_text('{"state": "fin')
    command = run.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert_same_run(run, fingerprint(trained))
    assert run.status()["state"] == "finished"
    named = [event["message"] for event in run.events("damaged")]
    assert all(any(name in text for text in named) for name in ("status.json", "journal.jsonl", "metrics.jsonl")), named


def test_finished_run_without_final_writes_it_again(trained: Run, copied: Callable[[], Run]):
    run = copied()
    shutil.rmtree(run.path / "final")
    command = run.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert_same_run(run, fingerprint(trained))


@pytest.mark.parametrize("left", ["nothing", "damaged"])
def test_finished_run_whose_weights_are_lost_is_an_error(copied: Callable[[], Run], left: str):
    run = copied()
    shutil.rmtree(run.path / "final")
    for checkpoint in (run.path / "checkpoints").glob("step_*"):
        if left == "nothing":
            shutil.rmtree(checkpoint)
        else:
            (checkpoint / "trainer.safetensors").write_bytes(b"")
    before = (run.path / "journal.jsonl").read_bytes()
    command = run.grpo("--resume")
    assert command.wait() == 4 and "nothing is left to do" not in command.text(), command.text()
    assert (run.path / "journal.jsonl").read_bytes() == before
