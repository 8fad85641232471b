"""What the reward server and its workers do to themselves before they touch user code.

Die with the parent, drop secrets, silence the terminal, limit memory; and how children are found, ended and taken
leave of. Linux does all of it; elsewhere what the system lacks is left out, and the end of a socket still ends every
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Collection
from pathlib import Path

from shoal.observability.redact import SECRET_NAME

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the process that forked this one ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_at_parent_death() -> None:
    """As above with SIGTERM, for a process that still has children of its own to end."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can slip away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def reset_signals() -> None:
    """Forget handlers inherited from the main process."""
    with contextlib.suppress(ValueError, OSError):
        signal.set_wakeup_fd(-1)
    for number in _RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    faulthandler.disable()


def silence(keep: int) -> None:
    """Point every inherited descriptor but one to nowhere: terminal, logs, locks, sockets of the main process.

    They are replaced, not closed: a Python object that still owns a number must not close what was opened in its place.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in _open_descriptors():
        if descriptor not in (keep, null):
            with contextlib.suppress(OSError):
                os.dup2(null, descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115


def _open_descriptors() -> list[int]:
    try:
        found = [int(entry.name) for entry in Path("/dev/fd").iterdir()]
    except OSError:
        found = []
    return sorted({0, 1, 2, *found})


def drop_secrets(keep: Collection[str] = ()) -> None:
    """From what this process and its children are told, and from where the kernel shows what it was started with."""
    names = [name for name in os.environ if SECRET_NAME.search(name) and name not in keep]
    for name in names:
        del os.environ[name]
    if sys.platform == "linux":
        _wipe_initial_environment(names)


def _wipe_initial_environment(names: Collection[str]) -> None:
    """/proc/PID/environ is this memory, whatever became of the variables since."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0") if end > start else ():
        name, _, value = entry.partition(b"=")
        if os.fsdecode(name) in names:
            ctypes.memset(at + len(name) + 1, ord("x"), len(value))
        at += len(entry) + 1


def limit_memory(extra_bytes: int) -> None:
    """No core files, and `extra_bytes` of address space on top of what was inherited."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        # If memory runs out anyway, the kernel takes this process before the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + extra_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def children() -> list[int]:
    """Process ids of this process's direct children."""
    own, found = os.getpid(), []
    for entry in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command name may hold anything, so fields are counted from its closing bracket.
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == own:
                found.append(int(entry.parent.name))
    return found


def kill_group(pid: int) -> None:
    """SIGKILL to a process group and its leader, gone or not."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_of(pid: int) -> str | None:
    """How a child ended, None while it runs. It is not reaped yet."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "it is gone"
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return f"exit code {found.si_status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(found.si_status).name}"
    return f"killed by signal {found.si_status}"


def reap(pid: int) -> bool:
    """Take leave of a child; true once it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
