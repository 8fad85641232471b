"""Isolation of rewards that run code written by the model (`orch.reward.isolated`, Linux only). See SECURITY.md.

`isolate` confines the worker of one call: its own user, process, network, IPC and mount namespaces, a read-only file
system with empty /tmp, /var/tmp, /dev/shm and /run, no capabilities, limited processes and files. `bwrap_command`
builds the stricter sandbox in which `run_code` runs a program. The worker cannot be traced and holds the answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import site
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from shoal.core.errors import HardwareError
from shoal.rewards import cgroups
from shoal.rewards.sandbox import die_with_parent, open_descriptors

NOBODY = 65534
ALLOWED = "allowed"
TRY_LIMIT_S = 10.0
MAX_PROCESSES = 64  # processes and threads of one call
MAX_FILES = 256  # open files of a process
FILE_BYTES = 2**28  # largest file that a process can write
SCRATCH_BYTES = 2**26  # each of the empty folders
COVERED = ("/tmp", "/var/tmp", "/dev/shm", "/run")
STAGE = "/tmp"  # where folders of the host are mounted for bubblewrap, in a mount namespace of its own

_NEW_MOUNTS, _NEW_USER, _NEW_PIDS, _NEW_NETWORK, _NEW_IPC = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x08000000
_SET_DUMPABLE, _NO_NEW_PRIVILEGES = 4, 38
_CAPABILITY_VERSION = 0x20080522
_PRIVATE, _BIND = 0x40000 | 0x4000, 0x1000 | 0x4000  # recursive
_MOUNT_SETATTR, _RECURSIVE, _READ_ONLY = 442, 0x8000, 1
_libc = ctypes.CDLL(None, use_errno=True)


def isolate(needed: Sequence[str] = (), scratch_bytes: int = SCRATCH_BYTES) -> None:
    """Confine this process and the children it forks from now on. Raises OSError on failure.

    Processes forked after this call are in a process namespace of their own: all end with the first of them.
    """
    needed = [*needed, *python_folders()]
    files = len(open_descriptors()) + MAX_FILES  # inherited ones lead to /dev/null but keep their numbers (`silence`)
    spaces = _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_PIDS
    if os.geteuid() == 0:
        _unshare(spaces)
        _mount_empty_folders(needed, scratch_bytes)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        set_dumpable(True)  # else root owns /proc/self
        _enter_user_namespace(0)
    else:
        _enter_user_namespace(spaces)
        _mount_empty_folders(needed, scratch_bytes)
    # Counts only processes of the new user namespace, not the user's other processes.
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "give up new privileges")
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(header, none), "drop its capabilities")
    set_dumpable(False)  # no process without privileges can read its memory or take its descriptors
    die_with_parent()  # changing the user clears the parent-death signal


def set_dumpable(dumpable: bool) -> None:
    _checked(_libc.prctl(_SET_DUMPABLE, int(dumpable), 0, 0, 0), "set whether it can be dumped")


def _unshare(spaces: int) -> None:
    _checked(_libc.unshare(spaces), "enter new namespaces")


def _enter_user_namespace(others: int) -> None:
    user, group = os.geteuid(), os.getegid()
    _unshare(_NEW_USER | others)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text)
    # A nested user namespace would give capabilities again, and with them more of the kernel to attack.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def python_folders() -> list[str]:
    """Folders that a reward and a Python program need: the interpreter, its packages and Shoal."""
    own = str(Path(__file__).resolve().parents[2])
    executable = str(Path(sys.executable).resolve().parents[1])
    sites = [*site.getsitepackages(), *(path for path in sys.path if path.endswith("-packages"))]
    found = dict.fromkeys([sys.prefix, sys.base_prefix, executable, own, *sites])
    reachable = [path for path in found if os.access(path, os.X_OK) and Path(path).is_dir()]
    folders = [path for path in reachable if path not in ("/", "/usr")]
    return [path for path in folders if not any(_is_below(path, other) for other in folders if other != path)]


def _is_below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _mount_empty_folders(needed: Sequence[str], size: int) -> None:
    """Make all files read-only, and put empty folders over shared ones and over those that hide `needed` paths."""
    _mount("none", "/", None, _PRIVATE)
    covered = [path for path in COVERED if Path(path).is_dir() and not Path(path).is_symlink()]
    if os.geteuid() == 0:
        private = filter(None, map(_private_ancestor, needed))
        covered += [path for path in dict.fromkeys(private) if not any(_is_below(path, over) for over in covered)]
    kept = {path: os.open(path, os.O_PATH) for path in needed if any(_is_below(path, over) for over in covered)}
    _set_read_only("/", True)
    if os.geteuid() == 0:
        _set_read_only("/proc", False)  # for the maps of the user namespace
    for path in covered:
        scratch = path in COVERED
        _mount("tmpfs", path, "tmpfs", 0, f"size={size},mode={'1777' if scratch else '755'}")
    mask = os.umask(0o022)  # another user passes through the folders above the needed ones
    for path, descriptor in kept.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, None, _BIND)
        _set_read_only(path, True)
        os.close(descriptor)
    os.umask(mask)


def _private_ancestor(path: str) -> str | None:
    """The topmost folder above a path that other users cannot enter."""
    for folder in reversed(Path(path).parents):
        if not folder.stat().st_mode & 0o001:
            return str(folder)
    return None


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = None if kind is None else kind.encode()
    result = _libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {target}")


def _set_read_only(path: str, on: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY if on else 0, 0 if on else _READ_ONLY, 0, 0)
    result = _libc.syscall(_MOUNT_SETATTR, -100, path.encode(), _RECURSIVE, attributes, ctypes.sizeof(attributes))
    _checked(result, f"make {path} read-only")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a process cannot {what}: {os.strerror(number)}")


# The sandbox of `run_code`


@cache
def find_bwrap() -> str | None:
    """The path of a bubblewrap that works here and supports what we need, None without one."""
    path = shutil.which("bwrap")
    if path is None or sys.platform != "linux":
        return None
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            sources = stage(python_folders())
            os.execv(path, bwrap_command(path, [sys.executable, "-I", "-c", ""], sources, 2**30))
        os._exit(1)
    return path if os.waitpid(pid, 0)[1] == 0 else None


def stage(folders: Sequence[str]) -> dict[str, str]:
    """In the child that will become bubblewrap: give up root. Returns folder → where it can be read.

    Root first mounts the folders where nobody can reach them: Python may lie in a private home directory.
    """
    if os.geteuid() != 0:
        return {folder: folder for folder in folders}
    _unshare(_NEW_MOUNTS)
    _mount("none", "/", None, _PRIVATE)
    opened = {folder: os.open(folder, os.O_PATH) for folder in folders}
    _mount("tmpfs", STAGE, "tmpfs", 0, "size=65536,mode=755")
    staged: dict[str, str] = {}
    for number, (folder, descriptor) in enumerate(opened.items()):
        staged[folder] = f"{STAGE}/{number}"
        Path(staged[folder]).mkdir()
        _mount(f"/proc/self/fd/{descriptor}", staged[folder], None, _BIND)
        os.close(descriptor)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    return staged


def bwrap_command(
    bwrap: str, argv: Sequence[str], sources: dict[str, str], memory_bytes: int, status: int | None = None
) -> list[str]:
    """A command that sees Python, the system's programs and empty folders, and nothing else of this machine."""
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent"]
    command += ["--new-session", "--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin"]
    command += ["--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", "--hostname", "sandbox"]
    command += ["--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        link = Path(folder)
        command += ["--symlink", str(link.readlink()), folder] if link.is_symlink() else []
        command += ["--ro-bind", folder, folder] if link.is_dir() and not link.is_symlink() else []
    for file in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        command += ["--ro-bind-try", file, file]
    size = str(SCRATCH_BYTES)
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", size, "--tmpfs", "/dev/shm"]
    command += ["--size", size, "--tmpfs", "/tmp"]
    for folder, source in sources.items():  # after /tmp, which they may be in
        command += ["--ro-bind", source, folder]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    command += ["--json-status-fd", str(status)] if status is not None else []
    # Inside, so that only processes of this sandbox are counted.
    limits = f"ulimit -u {MAX_PROCESSES} 2>/dev/null || ulimit -p {MAX_PROCESSES}; ulimit -n {MAX_FILES}; ulimit -c 0"
    limits += f"; ulimit -v {memory_bytes // 1024}; ulimit -f {FILE_BYTES // 512}"
    return [*command, "--", "/bin/sh", "-c", f'{limits}; exec "$@"', "sh", *argv]


# What this machine supports


def why_not(needed: Sequence[str] = ()) -> str | None:
    """Return why isolation does not work here or would hide the `needed` files, None if it works.

    The test runs in a child process, because isolation cannot be undone.
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
    with os.fdopen(reading, "rb", buffering=0) as answer:
        ready, _, _ = select.select([answer], [], [], TRY_LIMIT_S)
        result = answer.read(1 << 12) if ready else b""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reason = result.decode(errors="replace") or "the test process was killed or timed out"
    return None if reason == ALLOWED else reason


def _tried(needed: Sequence[str]) -> str:
    try:
        isolate()
    except Exception as error:
        return str(error) or type(error).__name__
    hidden = [path for path in needed if not os.access(path, os.R_OK)]
    return f"a confined reward, which runs as user {os.geteuid()}, cannot read {hidden[0]}" if hidden else ALLOWED


def check_isolation(needed: Sequence[str] = ()) -> None:
    if (reason := why_not(needed)) is not None:
        raise HardwareError(
            f"orch.reward.isolated: isolation does not work on this machine: {reason}; run where user namespaces are "
            "allowed and the Python installation is readable for all users, set best-effort to run without what is "
            "missing, or remove the key if you trust the code"
        )


def isolation_of(wanted: bool | str) -> tuple[bool, list[str]]:
    """Whether rewards are isolated, and what that does not guarantee here. Raises if the machine cannot do it.

    `wanted` is orch.reward.isolated: with "best-effort", rewards run without isolation where it does not work.
    """
    if not wanted:
        return False, []
    if wanted == "best-effort" and (reason := why_not(needed_files())) is not None:
        return False, [f"orch.reward.isolated: rewards are not isolated, and nothing is guaranteed: {reason}"]
    check_isolation(needed_files())
    return True, [f"orch.reward.isolated: {gap}" for gap in gaps()]


def gaps() -> list[str]:
    """What isolation cannot guarantee on this machine although it works."""
    found = []
    if find_bwrap() is None:
        found.append(
            "bubblewrap (bwrap 0.8 or newer) is missing or does not work here: "
            "run_code runs programs with the rights of the reward"
        )
    if missing := [name for name in cgroups.LIMITS if name not in cgroups.parents()]:
        found.append(
            f"this user cannot create control groups ({', '.join(missing)}): memory is limited per process, not in sum"
        )
    return found


def needed_files() -> list[str]:
    """Files that every reward needs: the interpreter, its library, and this package."""
    return [sys.executable, os.__file__, __file__]
