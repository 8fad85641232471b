"""A place of its own for rewards that run what a model wrote: no network, nobody's rights, few processes.

Called in a reward worker before any job, where `orch.reward.isolated` asks for it. Linux only. Files that the world may
read stay readable, and whoever starts the run as an ordinary user lends that user's files; root lends nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import HardwareError
from shoal.rewards import confine

NOBODY = 65534
MAX_PROCESSES = 64  # of one job, with its threads
_NEW_USER, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000
_SET_DUMPABLE, _NO_NEW_PRIVILEGES = 4, 38
_CAPABILITY_VERSION = 0x20080522


def isolate() -> None:
    """Leave the network, other processes' memory and all privileges behind. Raises OSError where that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _checked(libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0), "be dumpable")  # else /proc/self is root's
    user, group = os.geteuid(), os.getegid()
    _checked(libc.unshare(_NEW_USER | _NEW_NETWORK | _NEW_IPC), "unshare its user and network namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text)
    # Counted in the new namespace alone, so that the user's other processes do not use it up.
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "give up new privileges")
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _checked(libc.capset(header, none), "drop its capabilities")
    confine.die_with_parent()  # changing the user has switched it off


def why_not(needed: Sequence[str] = ()) -> str | None:
    """What keeps a process from being isolated here, or from reading what it needs then; None if nothing does.

    Tried in a child: there is no way back.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(writing, _tried(needed).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said.decode(errors="replace") or None


def check_isolation(needed: Sequence[str] = ()) -> None:
    if (reason := why_not(needed)) is not None:
        raise HardwareError(
            f"orch.reward.isolated: not on this machine: {reason}; start the run where user namespaces are allowed and "
            "Python lies where all may read it, or leave the key out and trust the code"
        )


def _tried(needed: Sequence[str]) -> str:
    try:
        isolate()
    except Exception as error:
        return str(error) or type(error).__name__
    hidden = [path for path in needed if not os.access(path, os.R_OK)]
    return f"user {NOBODY}, whose rights it gets when root starts it, may not read {hidden[0]}" if hidden else ""


def needed_files() -> list[str]:
    """What a reward cannot do without: the interpreter, its library, and this package."""
    return [sys.executable, os.__file__, __file__]


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a process may not {what}: {os.strerror(number)}")
