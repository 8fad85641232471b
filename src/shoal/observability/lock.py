"""The exclusive lock of a run directory: an flock, which dies with its holder, on a file that names the holder.

Taken by RunDir. A lock file left by a killed process blocks nobody; its content is only for people to read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.errors import RunLockedError, StorageError
from shoal.observability.atomic import storage

LOCK_NAME = "run.lock"
LATELY_S = 900.0


class RunLock:
    """Held from construction until `release`."""

    def __init__(self, folder: Path, name: str = LOCK_NAME, taken: str | None = None) -> None:
        """`taken` says what it means that somebody holds it, before that one's name."""
        self.path = folder / name
        with storage(f"open {self.path}"):
            self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                taken = taken or f"{folder} is in use by"
                raise RunLockedError(_locked_message(taken, _read_holder(self.path))) from error
            raise StorageError(f"could not lock {self.path}: {error.strerror}; use a file system with flock") from error
        with storage(f"write {self.path}"):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(_describe_self()).encode(), 0)
        _held.add(self)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def find_holder(folder: Path) -> dict[str, Any] | None:
    """Who runs in `folder` right now: pid, host, started_at; None if nobody does."""
    path = folder / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read_holder(path)
    finally:
        os.close(descriptor)
    return None


def seems_running(folder: Path) -> bool:
    """Whether a run that calls itself running still is.

    A lock held on another machine cannot always be seen through a mount; there, files that changed lately are the sign.
    """
    if find_holder(folder) is not None:
        return True
    if _read_holder(folder / LOCK_NAME).get("host") in (None, socket.gethostname()):
        return False
    watched = [folder / name for name in ("status.json", "metrics.jsonl", "events.jsonl", "journal.jsonl")]
    newest = max((path.stat().st_mtime for path in watched if path.exists()), default=0.0)
    return time.time() - newest < LATELY_S


def _describe_self() -> dict[str, Any]:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "started_at": started}


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_text())
    except (OSError, ValueError):  # the holder may be writing its name this very moment
        return {}
    return holder if isinstance(holder, dict) else {}


def _locked_message(taken: str, holder: dict[str, Any]) -> str:
    who = "another process"
    if "pid" in holder:
        who = f"process {holder['pid']} on {holder.get('host', '?')}, started {holder.get('started_at', '?')}"
    return f"{taken} {who}; wait for it, stop it, or choose another output_dir"


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    # A forked child shares the lock; one that outlives its killed parent would keep the directory locked.
    for lock in list(_held):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_drop_in_child)
