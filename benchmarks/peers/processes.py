"""Runs a command and measures its processes: CPU seconds, memory, and both at the end of each training step."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
POLL_S = 0.1
MEMORY_EVERY = 5  # polls; reading the memory of a process takes milliseconds


@dataclass
class Measured:
    """`marks`: wall-clock and CPU seconds since the start, when the n-th line was seen in the file of steps."""

    code: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    marks: list[tuple[float, float]] = field(default_factory=list)


def measure(command: Sequence[str], log: Path, lines: Path, environment: Mapping[str, str], limit_s: float) -> Measured:
    """`cpu_s` counts all threads and child processes. Memory is the sum of the proportional set sizes."""
    found, start = Measured(), time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            watch(process, found, start, lines, limit_s)
        finally:  # after a timeout or an interruption
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found.code = process.returncode
    found.seconds = time.monotonic() - start
    add_marks(found, lines)
    return found


def watch(process: subprocess.Popen[bytes], found: Measured, start: float, lines: Path, limit_s: float) -> None:
    polls = 0
    while process.poll() is None and found.seconds <= limit_s:
        found.seconds = time.monotonic() - start
        tree = list(descendants(process.pid))
        found.cpu_s = max(found.cpu_s, sum(map(cpu_seconds, tree)))
        if polls % MEMORY_EVERY == 0:
            found.peak_bytes = max(found.peak_bytes, sum(map(memory_bytes, tree)))
        add_marks(found, lines)
        polls += 1
        time.sleep(POLL_S)


def add_marks(found: Measured, lines: Path) -> None:
    written = lines.read_bytes().count(b"\n") if lines.exists() else 0
    found.marks += [(found.seconds, found.cpu_s)] * (written - len(found.marks))


def descendants(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [int(name.name) for name in Path(f"/proc/{pid}/task").iterdir() if int(name.name) != pid]
        for thread in threads:
            children += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except (OSError, ValueError):
        return
    for child in children:
        yield from descendants(int(child))


def cpu_seconds(pid: int) -> float:
    """Of a process and the children that it has already waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def memory_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
