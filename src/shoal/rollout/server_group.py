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
# As Python's multiprocessing names what processes share; whoever is killed leaves it behind.
_SHARED = re.compile(r" (/dev/shm/(?:psm_|sem\.mp-)[\w-]+)$", re.MULTILINE)
_STOPPED = "Tt"


class ServerGroup:
    """`group` is the id of its first process, and of the process group."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._shared: set[Path] = set()

    def stopped(self) -> int | None:
        """A process of it that somebody has stopped (SIGSTOP, a debugger)."""
        return next((pid for pid, state in self._members() if state in _STOPPED), None)

    def note_shared(self) -> None:
        """Remember the shared memory that it has open now: once it is gone, nobody can tell whose that was."""
        for pid, _ in self._members():
            with contextlib.suppress(OSError):
                self._shared |= {Path(found) for found in _SHARED.findall((PROC / str(pid) / "maps").read_text())}

    def remove_shared(self) -> None:
        """Of a group that is gone. vLLM that is asked to end removes it itself; one that is killed does not."""
        for file in self._shared:
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
