"""The run lock against other processes: alive, killed, and forked from the holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.core.errors import EXIT_LOCKED, RunLockedError, StorageError
from shoal.runs.files import RunLock, find_holder, seems_running
from shoal.runs.run_dir import RunDir

HOLD = """
import sys, time
from pathlib import Path
from shoal.runs.files import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""

FORK = """
import os, sys, time
from pathlib import Path
from shoal.runs.files import RunLock
lock = RunLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def start(code: str, folder: Path) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_holder_is_named_and_a_killed_holder_does_not_block(tmp_path: Path) -> None:
    process, _ = start(HOLD, tmp_path)
    try:
        holder = find_holder(tmp_path)
        assert holder is not None and holder["pid"] == process.pid
        with pytest.raises(RunLockedError, match=f"in use by process {process.pid} on .*, started 20") as caught:
            RunDir.create(tmp_path, "", {})
        assert caught.value.exit_code == EXIT_LOCKED
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert find_holder(tmp_path) is None
    RunDir.create(tmp_path, "", {}).close()


def test_forked_child_that_outlives_the_holder_does_not_block(tmp_path: Path) -> None:
    process, child = start(FORK, tmp_path)
    try:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(int(child), 0)  # still there
        deadline = time.monotonic() + 5
        while find_holder(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)  # the child may not have closed its copy yet
        RunLock(tmp_path).release()
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_second_lock_in_one_process_is_refused_until_release(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(RunLockedError, match=str(os.getpid())):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_failed_create_releases_the_lock(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where a folder should be")
    with pytest.raises(StorageError):
        RunDir.create(tmp_path, "", {})
    assert find_holder(tmp_path) is None


def test_lock_in_no_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not open"):
        RunLock(tmp_path / "missing")


def test_run_on_another_machine_is_diagnosed_from_its_files(tmp_path: Path) -> None:
    """The lock of another machine may be invisible through a mount; here it is not held."""
    with RunDir.create(tmp_path, "", {}) as run_dir:
        assert seems_running(run_dir.path)
    assert not seems_running(tmp_path), "the lock of this machine is reliable"
    (tmp_path / "run.lock").write_text('{"pid": 1, "host": "another-machine"}')
    assert seems_running(tmp_path)
    for name in ("status.json", "metrics.jsonl", "events.jsonl", "journal.jsonl"):
        os.utime(tmp_path / name, (time.time() - 3600, time.time() - 3600))
    assert not seems_running(tmp_path)
