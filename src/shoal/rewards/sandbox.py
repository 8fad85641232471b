"""Confinement of the reward server and its workers, and control of child processes.

The processes set a parent-death signal, drop secrets, redirect output to /dev/null and limit memory. Linux supports all
of it. On other systems unsupported steps are skipped; closing the socket still ends every process. Isolation from code
written by the model is in `isolation`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from shoal.runs.secrets import SECRET_NAME

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Let the kernel send SIGKILL to this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_at_parent_death(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel send a signal when the parent ends, for a process that must end its own children first.

    SIGCONT also wakes a stopped process, and nothing can block that.
    """
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Adopt descendants whose parent ends (child subreaper)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def reset_signals() -> None:
    """Remove signal handlers inherited from the main process."""
    with contextlib.suppress(ValueError, OSError):
        signal.set_wakeup_fd(-1)
    for number in _RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    faulthandler.disable()


def ignore_stop_requests() -> None:
    """Outlive a SIGTERM to all processes of a service, which the main process may answer by saving its state first.

    A closed connection must not end this process either.
    """
    for number in (signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def silence(*keep: int) -> None:
    """Redirect every inherited descriptor except `keep` to /dev/null: terminal, logs, locks, sockets.

    Descriptors are replaced, not closed: an inherited Python object could otherwise close a reused number. Programs
    that are started later do not inherit them, because they would count against the program's limit of open files.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in open_descriptors():
        if descriptor not in (*keep, null):
            with contextlib.suppress(OSError):
                os.dup2(null, descriptor, inheritable=descriptor <= 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115


def open_descriptors() -> list[int]:
    try:
        found = [int(entry.name) for entry in Path("/dev/fd").iterdir()]
    except OSError:
        found = []
    return sorted({0, 1, 2, *found})


def drop_secrets(keep: Collection[str] = ()) -> None:
    """Remove secrets from os.environ and from /proc/PID/environ."""
    names = [name for name in os.environ if SECRET_NAME.search(name) and name not in keep]
    for name in names:
        del os.environ[name]
    if sys.platform == "linux":
        _wipe_initial_environment(names)


def _wipe_initial_environment(names: Collection[str]) -> None:
    """Overwrite the memory that /proc/PID/environ shows; changes of os.environ do not affect it."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0") if end > start else ():
        name, _, value = entry.partition(b"=")
        if os.fsdecode(name) in names:
            ctypes.memset(at + len(name) + 1, ord("x"), len(value))
        at += len(entry) + 1


def limit_memory(extra_bytes: int) -> None:
    """Disable core files, and limit the address space to the inherited size plus `extra_bytes`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        # Under memory pressure, the kernel kills this process before the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + extra_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def children(pid: int | None = None) -> list[int]:
    """Return the process ids of the direct children of a process, by default of this one."""
    parent, found = os.getpid() if pid is None else pid, []
    if sys.platform != "linux":
        return found
    with contextlib.suppress(OSError):  # fast, but a kernel may lack it
        for thread in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
        return found
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command name may contain any character, so parse after its closing bracket.
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(entry.parent.name))
    return found


def end_descendants(limit_s: float) -> bool:
    """Kill all descendants of this process, which must have called `adopt_orphans`. True if none is left.

    A process that forks and ends escapes a single pass, so this repeats without a pause at first.
    """
    began = time.monotonic()
    while below := _descendants():
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if (passed_s := time.monotonic() - began) > limit_s:
            return False
        if passed_s > limit_s / 4:
            time.sleep(0.002)
    return True


def _descendants() -> list[int]:
    found = children()
    for pid in found:  # grows while it is read
        found += [child for child in children(pid) if child not in found]
    return found


def kill_group(pid: int) -> None:
    """Send SIGKILL to a process group and its leader, if they exist."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_of(pid: int) -> str | None:
    """Describe how a child ended, None while it runs. Does not reap it."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "unknown exit status"
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return f"exit code {found.si_status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(found.si_status).name}"
    return f"killed by signal {found.si_status}"


def reap(pid: int) -> bool:
    """Reap a child. True once it has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
