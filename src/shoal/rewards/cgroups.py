"""Control groups that bound the memory and the processes of one isolated reward call, where the user may create them.

A group counts what no limit of a single process does: memory over all processes, files in tmpfs and memfd. Versions 1
and 2 are supported. Groups are named after the keeper, which removes those that a killed server left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LIMITS = {  # controller → (file of version 2, file of version 1)
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
}
NO_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")
REMOVE_LIMIT_S = 1.0


@cache
def parents() -> dict[str, Path]:
    """Per controller, the nearest group above this process in which a group can be created and limited."""
    found: dict[str, Path] = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, names, path = line.split(":", 2)
        base = ROOT / names if names else ROOT
        inside = base / path.lstrip("/")
        above = [inside, *(folder for folder in inside.parents if folder.is_relative_to(base))]
        for name in names.split(",") if names else LIMITS:
            usable = next((folder for folder in above if _works(folder, name)), None) if name in LIMITS else None
            if usable is not None and name not in found:
                found[name] = usable
                above = above if names else [usable]  # in version 2 a process is in one group for all controllers
    return found


def _works(folder: Path, controller: str) -> bool:
    """Try it with a process: version 2 also refuses to move a process between some groups."""
    group = folder / f"shoal-try-{os.getpid()}"
    if not (folder / "cgroup.procs").exists():
        return False
    try:
        group.mkdir()
    except OSError:
        return False
    try:
        _limit_file(group, controller).write_text(str(2**40) if controller == "memory" else "100000")
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                join([group])
                code = 0
            os._exit(code)
        return os.waitpid(pid, 0)[1] == 0
    except OSError:
        return False
    finally:
        remove([group])


def _limit_file(group: Path, controller: str) -> Path:
    return next((file for name in LIMITS[controller] if (file := group / name).exists()), group / LIMITS[controller][0])


def create(name: str, memory_bytes: int, processes: int) -> list[Path]:
    """Create the groups of one call, one per controller or one for all. Empty where that is not possible."""
    groups: list[Path] = []
    for controller, parent in parents().items():
        group = parent / name
        group.mkdir(exist_ok=True)
        groups += [group] if group not in groups else []
        _limit_file(group, controller).write_text(str(memory_bytes if controller == "memory" else processes))
        for file in NO_SWAP if controller == "memory" else ():
            with contextlib.suppress(OSError):
                if (group / file).exists():
                    (group / file).write_text("0" if file == NO_SWAP[0] else str(memory_bytes))
    return groups


def join(groups: Sequence[Path]) -> None:
    """Move this process into groups. Processes that it starts are in them as well."""
    for group in groups:
        (group / "cgroup.procs").write_text("0")


def remove(groups: Sequence[Path]) -> list[Path]:
    """Remove groups. Returns those that still have a process: a killed one takes a moment to end."""
    left = []
    for group in groups:
        try:
            group.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            left.append(group)
    return left


def remove_all(prefix: str) -> None:
    """Remove the groups that a killed server left."""
    deadline = time.monotonic() + REMOVE_LIMIT_S
    groups = [group for parent in set(parents().values()) for group in parent.glob(f"{prefix}-*")]
    while (groups := remove(groups)) and time.monotonic() < deadline:
        time.sleep(0.005)
