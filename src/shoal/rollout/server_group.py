"""The processes that a server of ours consists of, as Linux shows them: who is stopped, what they share, their end.

Used by launch.py, for the process group that it starts. Where there is no /proc, nothing is known and nothing is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
# As Python's multiprocessing names what processes share; whoever is killed leaves it behind.
SHARED_NAMES = ("psm_", "sem.mp-")
_MAPPED = re.compile(rf"\s(\d+)\s+{SHARED_MEMORY}/", re.MULTILINE)  # its number: a semaphore is mapped by another name
_STOPPED = "Tt"


class ServerGroup:
    """`group` is the id of its first process, and of the process group."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._shared: dict[Path, int] = {}  # the file and its number

    def stopped(self) -> int | None:
        """A process of it that somebody has stopped (SIGSTOP, a debugger)."""
        return next((pid for pid, state in self._members() if state in _STOPPED), None)

    def note_shared(self) -> None:
        """Remember the shared memory that it has open now: once it is gone, nobody can tell whose that was."""
        mapped: set[int] = set()
        for pid, _ in self._members():
            with contextlib.suppress(OSError):
                mapped |= set(map(int, _MAPPED.findall((PROC / str(pid) / "maps").read_text())))
        if mapped:
            self._shared |= {file: number for file, number in _shared_files() if number in mapped}

    def remove_shared(self) -> None:
        """Of a group that is gone. vLLM that is asked to end removes it itself; one that is killed does not."""
        left = dict(_shared_files())
        for file, number in self._shared.items():
            if left.get(file) == number:
                with contextlib.suppress(OSError):
                    file.unlink()
        self._shared.clear()

    def send(self, number: int) -> None:
        """One that is stopped is woken, or it would heed nothing but SIGKILL."""
        for sent in (number, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, sent)

    def lives(self) -> bool:
        try:
            os.killpg(self._group, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _members(self) -> Iterator[tuple[int, str]]:
        """(id, state) of each."""
        for entry in PROC.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The command's name may hold anything, so fields are counted from its closing bracket.
                state, _, group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
                if int(group) == self._group:
                    yield int(entry.parent.name), state


def _shared_files() -> Iterator[tuple[Path, int]]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            if entry.name.startswith(SHARED_NAMES):
                yield Path(entry.path), entry.inode()
