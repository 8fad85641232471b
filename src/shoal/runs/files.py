"""File primitives for everything written into a run directory: atomic replacement, fsync, checksums and the run lock.

An OSError becomes a StorageError that says what failed and what to do. `fault` marks the points where tests kill the
process or make the disk fail. The lock is an flock: the kernel releases it when its holder dies, so a lock file left by
a killed process blocks nobody. The content of the lock file is only information for people.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from shoal.core.errors import RunLockedError, StorageError

TEMPORARY = ".tmp-"  # prefix of unfinished files and folders; a resume removes them
REPLACED = ".old-"  # prefix of a folder that is being replaced; a resume restores it if the replacement is missing
BLOCK_BYTES = 4096  # smallest allocation of a file on most file systems
DIGEST_BLOCK_BYTES = 8 << 20
READ_BYTES = 1 << 20  # per read: the data is still in the CPU cache when it is hashed
DIGEST_THREADS = min(16, os.cpu_count() or 1)  # hashing and reading release the GIL
LOCK_NAME = "run.lock"
PROGRESS_NAME = "logs/progress.json"
RECENT_S = 900.0  # a run on another machine counts as running if its files changed within this time

_CAUSES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EROFS: "the file system is read-only; choose another output_dir",
    errno.EIO: "the device reported an I/O error; check the disk",
    errno.EACCES: "permission denied; check the owner and mode of the folder",
    errno.EPERM: "not permitted; check the owner and mode of the folder",
    errno.ENOENT: "the folder is gone; was it removed during the run?",
    errno.ENOTDIR: "a file is in the place of a folder; choose another output_dir",
    errno.EISDIR: "a folder is in the place of a file; choose another output_dir",
    errno.ESTALE: "the network file system lost the file; check the mount",
}

_fault_hook: Callable[[str], None] | None = None


def fault(name: str) -> None:
    """A named point where a test can kill the process or raise. Does nothing without a hook."""
    if _fault_hook is not None:
        _fault_hook(name)


def set_fault_hook(hook: Callable[[str], None] | None) -> None:
    global _fault_hook
    _fault_hook = hook


@contextmanager
def storage(action: str) -> Iterator[None]:
    """Turn an OSError in the block into a StorageError that names `action`, the cause and what to do."""
    try:
        yield
    except OSError as error:
        raise storage_error(action, error) from error


def storage_error(action: str, error: Exception) -> StorageError:
    cause = str(error)
    if isinstance(error, OSError):
        cause = _CAUSES.get(error.errno or 0, error.strerror or str(error))
        if error.errno == errno.ENOENT and action.startswith("create "):
            cause = "no folder can be created there; choose another folder"
    return StorageError(f"could not {action}: {cause}")


def fsync_folder(folder: Path) -> None:
    """Make renames and new files in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | Iterable[bytes], *, durable: bool = True) -> None:
    """Replace `path` atomically: a reader sees either the old or the new content.

    Uses open() instead of mkstemp, so that the file mode follows the umask.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    chunks = (content,) if isinstance(content, bytes) else content
    with storage(f"write {path}"):
        try:
            with temporary.open("wb") as file:
                file.writelines(chunks)
                file.flush()
                fault(f"written:{path.name}")
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
            if durable:
                fsync_folder(path.parent)
        except BaseException:
            remove_quietly(temporary)
            raise


def overwrite(path: Path, content: bytes) -> None:
    """Overwrite an existing file in place. This works on a full disk, because the file already owns its block.

    Limited to one block, so that a reader is unlikely to see a partial write. Errors are ignored: the caller already
    handles the failed atomic write.
    """
    if len(content) > BLOCK_BYTES:
        return
    with suppress(OSError), path.open("rb+") as file:
        file.write(content)
        file.truncate()


def follow_umask(folder: Path) -> None:
    """Give the files below `folder` the mode that open() gives: safetensors creates files that only the owner reads."""
    mode = folder.stat().st_mode & 0o666  # the umask itself can only be read by changing it, for all threads
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 != mode:
            with suppress(PermissionError):  # written by another user
                path.chmod(mode)


def fsync_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, and `folder` itself."""
    for entry in sorted(folder.rglob("*")):
        if entry.is_dir():
            fsync_folder(entry)
            continue
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    fsync_folder(folder)


def open_to_read(path: Path) -> BufferedReader:
    fault(f"read:{path.name}")
    return path.open("rb")


def move_into_place(finished: Path, target: Path, durable: bool = True) -> None:
    """Rename a finished folder to `target`, replacing an existing one. `sweep_folder` repairs an interrupted call."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        remove_quietly(replaced)
        target.rename(replaced)
        fault(f"replaced:{target.name}")
    finished.rename(target)
    if durable:
        fsync_folder(target.parent)
    remove_quietly(replaced)


def sweep_folder(folder: Path) -> list[str]:
    """Remove unfinished entries and restore folders whose replacement is missing. Returns the removed names."""
    swept = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(REPLACED):
            original = entry.with_name(entry.name.removeprefix(REPLACED))
            if not original.exists():
                entry.rename(original)
                continue
        elif not entry.name.startswith(TEMPORARY):
            continue
        remove_quietly(entry)
        swept.append(entry.name)
    return swept


def remove_quietly(path: Path) -> None:
    """Remove a file or folder if it exists. Errors are ignored: the next resume sweeps again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def digest_files(paths: Iterable[Path]) -> list[str]:
    """One checksum per file: the SHA-256 of the SHA-256s of its blocks, computed on all cores."""
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        return [_digest_file(path, pool) for path in paths]


def digest_buffers(buffers: Sequence[memoryview]) -> list[str]:
    """The same checksum for data in memory."""
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        blocks = [
            [pool.submit(_digest_block, buffer[start : start + DIGEST_BLOCK_BYTES]) for start in _starts(len(buffer))]
            for buffer in buffers
        ]
        return [_combine(futures) for futures in blocks]


def _digest_file(path: Path, pool: ThreadPoolExecutor) -> str:
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _combine([pool.submit(_digest_file_block, file.fileno(), start) for start in _starts(size)])


def _starts(size: int) -> range:
    return range(0, size, DIGEST_BLOCK_BYTES)


def _digest_block(block: memoryview) -> bytes:
    return hashlib.sha256(block).digest()


def _digest_file_block(descriptor: int, start: int) -> bytes:
    """One block of a file, which may have become shorter in the meantime."""
    block, end = hashlib.sha256(), start + DIGEST_BLOCK_BYTES
    while start < end and (part := os.pread(descriptor, min(READ_BYTES, end - start), start)):
        block.update(part)
        start += len(part)
    return block.digest()


def _combine(blocks: Iterable[Future[bytes]]) -> str:
    return hashlib.sha256(b"".join(block.result() for block in blocks)).hexdigest()


class RunLock:
    """An exclusive lock on a folder, held from construction until `release`."""

    def __init__(self, folder: Path, name: str = LOCK_NAME, taken: str | None = None) -> None:
        """`taken` is the start of the error message if another process holds the lock; the holder follows it."""
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


def find_holder(folder: Path, name: str = LOCK_NAME) -> dict[str, Any] | None:
    """The process that holds the lock of `folder` (pid, host, started_at), or None."""
    path = folder / name
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
    """Whether a run whose status is "running" is still alive.

    A lock held on another machine may be invisible through a network mount. In that case recently changed files count.
    """
    if find_holder(folder) is not None:
        return True
    if _read_holder(folder / LOCK_NAME).get("host") in (None, socket.gethostname()):
        return False
    names = ("status.json", "metrics.jsonl", "events.jsonl", "journal.jsonl", PROGRESS_NAME)
    files = [folder / name for name in names]
    newest = max((path.stat().st_mtime for path in files if path.exists()), default=0.0)
    return time.time() - newest < RECENT_S


def _describe_self() -> dict[str, Any]:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "started_at": started}


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_text())
    except (OSError, ValueError):  # the holder may be writing at this moment
        return {}
    return holder if isinstance(holder, dict) else {}


def _locked_message(taken: str, holder: dict[str, Any]) -> str:
    who = "another process"
    if "pid" in holder:
        who = f"process {holder['pid']} on {holder.get('host', '?')}, started {holder.get('started_at', '?')}"
    return f"{taken} {who}; wait for it, stop it, or choose another output_dir"


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    # A forked child inherits the lock. A child that outlives its killed parent would keep the directory locked.
    for lock in list(_held):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_drop_in_child)
