"""Run a command that starts processes, with a deadline. After the deadline, the stacks of all processes are printed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SHOWN = 6000
DUMP_S = 0.5  # for the stacks of one process to be written, before those of the next


def run_within(limit_s: float, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> str:
    """The output of the command, which must exit with 0 before the limit.

    The output goes to a file, because processes that outlive a killed parent would keep a pipe and its reader open.
    """
    output = folder / f"output-{time.monotonic_ns()}.txt"
    with output.open("wb") as file:
        variables = {**env, "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        below = children_of(process.pid)
        for pid in (*reversed(below), process.pid):
            _send(pid, signal.SIGABRT)  # Python writes the stacks of all its threads
            time.sleep(DUMP_S)
        for pid in (process.pid, *below):
            _send(pid, signal.SIGKILL)
        process.wait(10)
        said = output.read_text(errors="replace")[-SHOWN:]
        raise AssertionError(f"not done after {limit_s:.0f} s: {' '.join(command)}\n{said}") from None
    said = output.read_text(errors="replace")
    assert code == 0, f"exit code {code}: {' '.join(command)}\n{said[-SHOWN:]}"
    return said


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    """All descendants of `pid`, from /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def until(true: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
