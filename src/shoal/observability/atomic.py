"""Files that are either whole or absent: atomic replacement, fsync, hashes, and OSError told as StorageError.

Used by everything that writes into a run directory. `fault` marks the places where tests cut the power or break a disk.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from shoal.errors import StorageError

TEMPORARY = ".tmp-"  # prefix of anything unfinished; such names are swept away on resume
BLOCK_BYTES = 4096  # what a file takes at least, on most file systems
REPLACED = ".old-"  # prefix of a folder that is being replaced; put back if the replacement never arrived

_CAUSES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EROFS: "the file system is read-only; choose another output_dir",
    errno.EIO: "the device reported an I/O error; check the disk",
    errno.EACCES: "permission denied; check the owner and mode of the folder",
    errno.EPERM: "not permitted; check the owner and mode of the folder",
    errno.ENOENT: "the folder is gone; was it removed while the run was going on?",
    errno.ENOTDIR: "a file stands where a folder is needed; choose another output_dir",
    errno.EISDIR: "a folder stands where a file is needed; choose another output_dir",
    errno.ESTALE: "the network file system lost the file; check the mount",
}

_fault_hook: Callable[[str], None] | None = None


def fault(name: str) -> None:
    """Does nothing, unless a test installed a hook that kills or raises at the place called `name`."""
    if _fault_hook is not None:
        _fault_hook(name)


def set_fault_hook(hook: Callable[[str], None] | None) -> None:
    global _fault_hook
    _fault_hook = hook


@contextmanager
def storage(action: str) -> Iterator[None]:
    """Tell an OSError in the block as a StorageError that says what was being done and what to do now."""
    try:
        yield
    except OSError as error:
        raise storage_error(action, error) from error


def storage_error(action: str, error: Exception) -> StorageError:
    cause = str(error)
    if isinstance(error, OSError):
        cause = _CAUSES.get(error.errno or 0, error.strerror or str(error))
        if error.errno == errno.ENOENT and action.startswith("create "):
            cause = "no folder can be made there; choose another train.output_dir"
    return StorageError(f"could not {action}: {cause}")


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | Iterable[bytes], *, durable: bool = True) -> None:
    """Replace `path` in one move: a reader sees the old content or the new, never a part.

    Opened plainly rather than with mkstemp, so that the mode follows the umask as for any other file.
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
    """In its place, if it is there: a full disk has no room for a second file, but these blocks are the file's own.

    Of one block at most, so that a reader hardly sees a part. Failing to is nothing new: writing it has failed before.
    """
    if len(content) > BLOCK_BYTES:
        return
    with suppress(OSError), path.open("rb+") as file:
        file.write(content)
        file.truncate()


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
    """Rename a finished folder to `target`, replacing what stood there; `recover_folder` mends a cut in between."""
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
    """Remove what never got finished, and put back what was being replaced. Returns the removed names."""
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
    """Remove a file or folder if it is there; failing to is no reason to stop, the next resume sweeps again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
