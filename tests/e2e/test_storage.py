"""Disks that are full, read-only or missing: exit code 4, the reason in status.json if possible, nothing lost.

A small disk is a separate tmpfs. Tests that need one are skipped with a reason if this process cannot mount it.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from .helpers.processes import Command, WarmPython
from .helpers.runs import Run, assert_same_run, base_config, each, fingerprint, wait_for_steps
from .helpers.storage import small_disk

NewRun = Callable[..., Run]
SLOW = {"batch_size": 8, "reward": {"function": "my_code:slow_reward"}}


def fill(disk: Path, leave_bytes: int) -> Path:
    """A file that takes all free space except `leave_bytes`."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while (free := shutil.disk_usage(disk).free - leave_bytes) > 0:  # the run writes at the same time
            file.write(b"x" * min(free, 65536))
    return filler


@pytest.fixture(scope="module")
def undisturbed(warm, model, tmp_path_factory) -> Run:
    config = base_config(model)
    config["orch"].update(SLOW)
    config["train"]["max_steps"] = 6
    run = Run(tmp_path_factory.mktemp("undisturbed"), warm).write(config)
    assert run.grpo().wait() == 0
    return run


@pytest.mark.parametrize("left", [0, 40_000], ids=["nothing", "less-than-a-checkpoint"])
def test_disk_that_fills_up(new_run: NewRun, undisturbed: Run, left: int):
    """There is no space for rollouts or a checkpoint, or only for a checkpoint. With free space, the run resumes
    exactly.
    """
    run = new_run(train={"max_steps": 6}, orch=SLOW)
    with small_disk(run.path):
        command = run.start()
        wait_for_steps(run, 2, command)
        filler = fill(run.path, left)
        assert command.wait(30) == 4, command.text()
        assert "the disk is full; free some space" in command.text() and "Traceback" not in command.text()
        status = run.status()
        assert (status["state"], status["resumable"]) == ("failed", True) and "disk is full" in status["reason"]
        assert "--resume" in status["next_command"]
        for name in ("journal.jsonl", "metrics.jsonl", "events.jsonl"):
            assert all(json.loads(line) for line in (run.path / name).read_text().splitlines()), "no partial line"
        filler.unlink()
        resumed = run.grpo("--resume")
        assert resumed.wait() == 0, resumed.text()
        assert_same_run(run, fingerprint(undisturbed))


def test_no_memory_at_the_start(new_run: NewRun):
    run = new_run()
    with small_disk(run.path):
        fill(run.path, 0)
        command = run.grpo()
        assert command.wait() == 4, command.text()
        assert "the disk is full" in command.text() and "Traceback" not in command.text()


def test_read_only_disk(new_run: NewRun):
    run = new_run()
    with small_disk(run.path, "1m", "ro"):
        command = run.grpo()
        assert command.wait() == 4, command.text()
        assert "the file system is read-only; choose another output_dir" in command.text()


def test_folder_removed_during_the_run(new_run: NewRun):
    run = new_run(train={"max_steps": 50}, orch=SLOW)
    command = run.start()
    wait_for_steps(run, 1, command)
    shutil.move(run.path, run.folder / "elsewhere")
    assert command.wait(30) == 4, command.text()
    assert "was it removed during the run?" in command.text()
    shutil.move(run.folder / "elsewhere", run.path)
    steps = len(run.journal())
    shutil.rmtree(run.path / "rollouts")  # for reading, not to continue from
    resumed = run.grpo("--resume", f"train.max_steps={steps + 1}")
    assert resumed.wait() == 0, resumed.text()


# A place, the number of the pass, and the records that the journal keeps if the device fails there.
WRITES = [
    (("written:step_000003.jsonl", 1), 2),
    (("appended:metrics.jsonl", 3), 2),
    (("appended:journal.jsonl", 3), 2),
    (("checkpoint:files", 1), None),  # written during step 3: the run ends at the next step boundary
    (("folder:synced", 3), 4),  # final/
]


@pytest.fixture(scope="module")
def four_steps(warm: WarmPython, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("four"), warm).write(base_config(model))
    assert run.grpo().wait() == 0
    return run


def told_as_storage(command: Command, words: str) -> None:
    """Exit code 4, and one line says which operation failed and why."""
    assert command.wait() == 4, command.text()
    told = [line for line in command.text().splitlines() if line.startswith("shoal: error: ")]
    assert len(told) == 1 and words in told[0], command.text()
    assert "Traceback" not in command.text()


def test_device_failure_during_write(new_run: NewRun, four_steps: Run):
    """Rollouts, metrics, journal, checkpoint, final/: no partial record. With a working device the run resumes."""

    def check(case: tuple[tuple[str, int], int | None]) -> None:
        place, kept = case
        run = new_run(place[0].replace(":", "-"))
        told_as_storage(run.grpo(faults=[(*place, "fail", errno.EIO)]), "the device reported an I/O error")
        status = run.status()
        assert (status["state"], status["resumable"]) == ("failed", True) and "I/O error" in status["reason"]
        assert len(run.journal()) in ([2, 3, 4] if kept is None else [kept]) and not (run.path / "final").exists()
        resumed = run.grpo("--resume")
        assert resumed.wait() == 0, resumed.text()
        assert_same_run(run, fingerprint(four_steps))

    each(WRITES, check)


def test_device_failure_during_read(four_steps: Run, tmp_path: Path):
    """Unreadable data does not count as empty, so nothing is truncated. An unreadable checkpoint is skipped."""
    shutil.copytree(four_steps.folder, tmp_path / "copy")
    run = Run(tmp_path / "copy", four_steps.warm)
    before = fingerprint(run)
    # Metrics and journal are first read from their copies in the checkpoint.
    for name, time in (("metrics.jsonl", 2), ("journal.jsonl", 2), ("events.jsonl", 1)):
        place = (f"read:{name}", time, "fail", errno.EIO)
        told_as_storage(run.grpo("--resume", "train.max_steps=5", faults=[place]), name)
        assert fingerprint(run) == before
    resumed = run.grpo("--resume", "train.max_steps=5", faults=[("read:trainer.safetensors", 1, "fail", errno.EIO)])
    assert resumed.wait() == 0, resumed.text()
    (event,) = run.events("checkpoint")
    assert "step_000004" in event["message"] and "I/O error" in event["message"]
    assert [event["step"] for event in run.events("resume")] == [2]
    assert run.metrics()[:4] == before["metrics"] and len(run.journal()) == 5


def test_disk_that_is_full_when_the_trained_model_is_written(new_run: NewRun, four_steps: Run):
    """All steps are trained and saved. Only final/ is missing, and the next command writes only final/."""
    run = new_run()
    with small_disk(run.path):
        filler = run.path / "filler"
        # Written at the start and with each of the two checkpoints. final/ is next.
        command = run.grpo(faults=[("written:status.json", 3, "fill", str(filler))])
        told_as_storage(command, f"could not save {Path('out') / 'final'}: the disk is full; free some space")
        assert run.checkpoints() == [2, 4] and not (run.path / "final").exists()
        assert not list(run.path.glob(".tmp-*")), "no partial files remain"
        filler.unlink()
        resumed = run.grpo("--resume")
        assert resumed.wait() == 0, resumed.text()
        assert_same_run(run, fingerprint(four_steps))


def test_disk_that_is_full_when_the_report_is_written(new_run: NewRun, four_steps: Run):
    """There is no space for the page or for the event about it. The run finishes."""
    run = new_run()
    last = len(four_steps.lines("events.jsonl"))  # of the run itself
    full = [("written:report.html", 1, "fail", errno.ENOSPC), ("appended:events.jsonl", last + 1, "fail", errno.ENOSPC)]
    command = run.grpo(faults=full)
    assert command.wait() == 0, command.text()
    assert "could not write out/report.html" in command.text() and "the disk is full" in command.text()
    assert run.status()["state"] == "finished" and len(run.lines("events.jsonl")) == last
    assert_same_run(run, fingerprint(four_steps))
