"""Disks that are full, read-only or gone: exit code 4, the reason in status.json where it can be written, nothing lost.

A small disk is a real one: a tmpfs of its own. Where this process may not mount one, those tests say so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from .helpers.runs import Run, assert_same_run, fingerprint, wait_for_steps

NewRun = Callable[..., Run]
SLOW = {"batch_size": 8, "reward": {"function": "my_code:slow_reward"}}


@contextmanager
def small_disk(folder: Path, size: str = "6m", *options: str) -> Iterator[Path]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    """A file that takes all there is but `leave_bytes`."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while (free := shutil.disk_usage(disk).free - leave_bytes) > 0:  # the run writes meanwhile
            file.write(b"x" * min(free, 65536))
    return filler


@pytest.fixture(scope="module")
def undisturbed(warm, model, tmp_path_factory) -> Run:
    from .helpers.runs import base_config

    config = base_config(model)
    config["orch"].update(SLOW)
    config["train"]["max_steps"] = 6
    run = Run(tmp_path_factory.mktemp("undisturbed"), warm).write(config)
    assert run.grpo().wait() == 0
    return run


@pytest.mark.parametrize("left", [0, 40_000], ids=["nothing", "less-than-a-checkpoint"])
def test_a_disk_that_fills_up(new_run: NewRun, undisturbed: Run, left: int):
    """No room for rollouts or a checkpoint, or for the latter alone. Once there is some, the run goes on, equal."""
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
            assert all(json.loads(line) for line in (run.path / name).read_text().splitlines()), "no half line"
        filler.unlink()
        resumed = run.grpo("--resume")
        assert resumed.wait() == 0, resumed.text()
        assert_same_run(run, fingerprint(undisturbed))


def test_no_room_to_begin_with(new_run: NewRun):
    run = new_run()
    with small_disk(run.path):
        fill(run.path, 0)
        command = run.grpo()
        assert command.wait() == 4, command.text()
        assert "the disk is full" in command.text() and "Traceback" not in command.text()


def test_a_read_only_disk(new_run: NewRun):
    run = new_run()
    with small_disk(run.path, "1m", "ro"):
        command = run.grpo()
        assert command.wait() == 4, command.text()
        assert "the file system is read-only; choose another output_dir" in command.text()


def test_a_folder_that_is_removed_while_the_run_goes_on(new_run: NewRun):
    run = new_run(train={"max_steps": 50}, orch=SLOW)
    command = run.start()
    wait_for_steps(run, 1, command)
    shutil.move(run.path, run.folder / "elsewhere")
    assert command.wait(30) == 4, command.text()
    assert "was it removed while the run was going on?" in command.text()
    shutil.move(run.folder / "elsewhere", run.path)
    steps = len(run.journal())
    shutil.rmtree(run.path / "rollouts")  # to read, not to go on from
    resumed = run.grpo("--resume", f"train.max_steps={steps + 1}")
    assert resumed.wait() == 0, resumed.text()
