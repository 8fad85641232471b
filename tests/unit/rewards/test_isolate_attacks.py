"""Programs that attack the reward that runs them: through `run_code`, as a child process, and as code of the reward."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import HardwareError
from shoal.core.types import Score
from shoal.envs import SingleTurn, answer_of, ask
from shoal.rewards import cgroups, isolation
from shoal.rewards.isolation import find_bwrap, why_not
from shoal.rewards.pool import RewardPool
from shoal.rewards.run_code import run_code

from .misbehaving import all_gone

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no namespaces here: {why_not()}")
needs_bwrap = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is missing")
needs_cgroups = pytest.mark.skipif("memory" not in cgroups.parents(), reason="control groups cannot be created")

MEMORY_BYTES = 2**29
SECRET = "the-answer-is-" + "forty-two"  # a constant that exists only in the memory of this process
SPACES = ("user", "pid", "net", "ipc", "mnt", "uts")

TAKE_OVER = """
import ctypes, os, sys
libc, won = ctypes.CDLL(None), []
for name in os.listdir("/proc"):
    if not name.isdigit() or name in (os.readlink("/proc/self"), str(os.getpid()), *sys.argv):
        continue
    try:
        won.append((name, "memory", open(f"/proc/{name}/mem", "r+b").fileno()))
    except OSError:
        pass
    pid = libc.syscall(434, int(name), 0)
    won += [(name, "descriptor", fd) for fd in range(32) if pid >= 0 and libc.syscall(438, pid, fd, 0) >= 0]
    if libc.ptrace(0x4206, int(name), 0, 0) == 0:
        won.append((name, "ptrace", 0))
print(won)
"""
FIND_SECRET = """
import re
word, found = b"the-answer-is-" + b"forty", 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
    for line in maps:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " rw" in line:
            memory.seek(start)
            found += memory.read(end - start).count(word + b"-two")
print(found)
"""
NESTED = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"
CAPABILITIES = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('CapE')])"
ALLOCATE = """
import os, time
ready, hold, holding = os.pipe(), os.pipe(), {}
os.set_blocking(ready[0], False)
for _ in range(12):
    pid = os.fork()
    if pid == 0:
        os.close(hold[1])
        block = b"x" * (100 * 2**20)
        os.write(ready[1], os.getpid().to_bytes(4, "big"))
        os.read(hold[0], 1)
        os._exit(0)
    holding[pid] = False
while not all(holding.values()):
    holding.pop(os.waitpid(-1, os.WNOHANG)[0], None)
    try:
        pid = int.from_bytes(os.read(ready[0], 4), "big")
        holding.update({pid: True} if pid in holding else {})
    except BlockingIOError:
        time.sleep(0.01)
print(len(holding))
"""
MEMFD = """
import os
fd, written, block = os.memfd_create("x"), 0, bytes(2**24)
try:
    while written < 2**30: written += os.write(fd, block)
except OSError: pass
print(written)
"""
FILL = """
import os
written = []
for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/dev", "/", "/etc", os.getcwd()):
    total = 0
    try:
        with open(folder + "/shoal-left-behind", "wb", 0) as file:
            while total < 2**28: total += file.write(bytes(2**22))
    except OSError: pass
    written.append(total)
print(max(written))
"""
CONNECT = """
import socket, sys
for name in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(name.replace("@", chr(0)))
        print("connected", name)
    except OSError: pass
"""
STAY = """
import os, subprocess, sys
subprocess.Popen(["setsid", "sh", "-c", 'exec setsid sleep "$0" &', sys.argv[1]], stdout=-3, stderr=-3)
subprocess.Popen(["setsid", "sleep", sys.argv[1]], stdout=-3, stderr=-3)
"""
IMPORT = "import colorsys, sys; print(sys.prefix)"
SCRIPTS = {
    "take_over": TAKE_OVER, "find_secret": FIND_SECRET, "nested": NESTED, "capabilities": CAPABILITIES,
    "allocate": ALLOCATE, "memfd": MEMFD, "fill": FILL, "connect": CONNECT, "stay": STAY, "import": IMPORT,
}  # fmt: skip


class Judged(SingleTurn):
    """The answer is WAY SCRIPT [ARGUMENTS]. The error of the call is the output of the script."""

    def tasks(self, split: str) -> Any:
        return [ask("what?", answer=SECRET)]

    def reward(self, task: Any, messages: Any) -> float:
        way, name, *arguments = answer_of(messages).split()
        if name == "spaces":
            inner = run_code(["sh", "-c", f"cd /proc/self/ns && readlink {' '.join(SPACES)}"]).stdout.split()
            outer = [str(Path(f"/proc/self/ns/{space}").readlink()) for space in SPACES]
            raise ValueError(sum(one == other for one, other in zip(inner, outer, strict=True)))
        command = [sys.executable, "-I", "-c", SCRIPTS[name], *arguments]
        if way == "sandbox":
            result = run_code(command, timeout_s=20)
            raise ValueError(result.stdout.strip() or f"code {result.exit_code}: {result.stderr[-300:]}")
        if way == "child":
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            raise ValueError(done.stdout.strip() or f"code {done.returncode}: {done.stderr[-300:]}")
        if way == "inside":
            exec_here(SCRIPTS[name], arguments)
        return 1.0


def exec_here(script: str, arguments: list[str]) -> None:
    """Like a reward that executes an answer in its own process."""
    import contextlib
    import io

    sys.argv = ["-c", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(script, "answer", "exec"), {})
    raise ValueError(said.getvalue().strip())


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """The run has more files open than a program may open."""
    made = RewardPool({"it": Judged()}, workers=1, timeout_s=30, memory_bytes=MEMORY_BYTES, isolated=True)
    with contextlib.ExitStack() as stack:
        for _ in range(isolation.MAX_FILES + 50):
            stack.enter_context(Path(os.devnull).open())
        made.start()
    yield made
    asyncio.run(made.close())


def judge(pool: RewardPool, answer: str) -> Score:
    return asyncio.run(pool.score("it", "train", 0, [{"role": "assistant", "content": answer}]))


def printed(pool: RewardPool, answer: str) -> str:
    score = judge(pool, answer)
    assert score.status == "error" and score.error is not None
    return score.error.partition(": ")[2].partition(" (test_isolate")[0]


SANDBOX = pytest.param("sandbox", marks=needs_bwrap)


@pytest.mark.parametrize("way", [SANDBOX, "child"])
def test_judge_cannot_be_taken_over(pool: RewardPool, way: str) -> None:
    """The previous worker exposed its socket (pidfd_getfd) and its memory (/proc/PID/mem) to child processes of its
    user.
    """
    own = "1" if way == "sandbox" else ""  # of bubblewrap, in the sandbox itself
    assert printed(pool, f"{way} take_over {own}") == "[]"


@pytest.mark.parametrize("way", [SANDBOX, "child"])
def test_answers_are_not_in_the_memory_of_the_program(pool: RewardPool, way: str) -> None:
    assert printed(pool, f"{way} find_secret") == "0"


@needs_bwrap
def test_program_shares_no_namespace_with_the_judge(pool: RewardPool) -> None:
    assert printed(pool, "sandbox spaces") == "0"


@pytest.mark.parametrize("way", [SANDBOX, "child", "inside"])
def test_no_capabilities_and_no_nested_user_namespace(pool: RewardPool, way: str) -> None:
    assert printed(pool, f"{way} nested") == "-1"
    assert set(printed(pool, f"{way} capabilities")) <= set("['0]")


@needs_cgroups
@pytest.mark.parametrize("way", [SANDBOX, "child", "inside"])
def test_memory_is_limited_in_sum(pool: RewardPool, way: str) -> None:
    """Twelve children of 100 MiB each, memfd and tmpfs share 512 MiB."""
    for script in ("allocate", "memfd"):
        score = judge(pool, f"{way} {script}")
        said = str(score.error).partition(": ")[2].partition(" (test_isolate")[0]
        assert not said.isdigit() or int(said) < (12 if script == "allocate" else MEMORY_BYTES), score


@pytest.mark.parametrize("way", [SANDBOX, "child", "inside"])
def test_files_are_limited_and_not_left_behind(pool: RewardPool, way: str) -> None:
    assert int(printed(pool, f"{way} fill")) <= 2**26
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/dev", "/", "/etc", Path.cwd()):
        assert not Path(folder, "shoal-left-behind").exists()


@pytest.mark.parametrize("way", [SANDBOX, "child", "inside"])
def test_sockets_of_other_programs_are_unreachable(pool: RewardPool, way: str, tmp_path: Path) -> None:
    name = f"/tmp/shoal-test-{os.getpid()}-{way}"
    with socket.socket(socket.AF_UNIX) as open_to_all, socket.socket(socket.AF_UNIX) as abstract:
        open_to_all.bind(name)
        Path(name).chmod(0o777)
        open_to_all.listen()
        abstract.bind("\0" + name)
        abstract.listen()
        try:
            assert "connected" not in printed(pool, f"{way} connect {name} @{name}")
        finally:
            Path(name).unlink()


@pytest.mark.parametrize("way", [SANDBOX, "child", "inside"])
def test_no_process_outlives_its_call(pool: RewardPool, way: str) -> None:
    duration = f"9{os.getpid()}{('sandbox', 'child', 'inside').index(way)}"
    judge(pool, f"{way} stay {duration}")
    time.sleep(0.3)
    left = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            left += [int(entry.parent.name)] if f"sleep\0{duration}\0".encode() == entry.read_bytes() else []
        except OSError:
            continue
    assert all_gone(left, within_s=2)


@pytest.mark.parametrize("way", [SANDBOX, "child", "inside"])
def test_python_under_a_private_home_is_found(pool: RewardPool, way: str) -> None:
    """Modules that are imported late are in a folder that only the owner can read."""
    assert printed(pool, f"{way} import") == sys.prefix


BELOW_TMP = """
import asyncio, sys
from shoal.envs import SingleTurn, answer_of, ask
from shoal.rewards.pool import RewardPool
from shoal.rewards.run_code import run_code

class Runs(SingleTurn):
    def tasks(self, split):
        return [ask("what?")]

    def reward(self, task, messages):
        import colorsys
        result = run_code([sys.executable, "-c", answer_of(messages)], timeout_s=20)
        raise ValueError(result.stdout or result.stderr[-300:])

async def main():
    pool = RewardPool({"it": Runs()}, workers=1, timeout_s=30, isolated=True)
    pool.start()
    code = "import os, sys, msgspec; print(sys.prefix, sorted(os.listdir('/tmp')), os.readlink('/proc/self/ns/pid'))"
    print((await pool.score("it", "train", 0, [{"role": "assistant", "content": code}])).error)
    await pool.close()

asyncio.run(main())
"""


@needs_bwrap
def test_python_in_a_private_folder_below_tmp() -> None:
    """/tmp of the sandbox is empty apart from the way to this Python. Namespaces differ: bubblewrap works."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        venv.create(f"{home}/venv", symlinks=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = Path(home, "venv", "lib", version, "site-packages", "these.pth")
        packages.write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        (Path(home) / "private").write_text("secret")
        environment = {**os.environ, "HOME": home, "PYTHONPATH": str(Path(isolation.__file__).parents[2])}
        command = [f"{home}/venv/bin/python", "-c", BELOW_TMP]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, umask=0o077)
    sources = Path(isolation.__file__).parts[:3]  # this test may run in a clone below /tmp
    shown = sorted({Path(home).name, *(sources[2:] if sources[:2] == ("/", "tmp") else ())})
    assert f"{home}/venv {shown} pid:[" in done.stdout, done.stdout + done.stderr[-500:]
    assert str(Path("/proc/self/ns/pid").readlink()) not in done.stdout


@needs_bwrap
def test_output_of_a_program(pool: RewardPool) -> None:
    class Runs(SingleTurn):
        def tasks(self, split: str) -> Any:
            return [ask("what?")]

        def reward(self, task: Any, messages: Any) -> dict[str, float]:
            echoed = run_code(["sh", "-c", "cat; echo odd >&2; exit 7"], stdin="x" * 10**6)
            late = run_code(["sleep", "60"], timeout_s=0.3)
            loud = run_code(["sh", "-c", "yes"], timeout_s=10)
            missing = run_code(["no-such-program"])
            killed = run_code(["sh", "-c", "kill -9 $$"])
            return {
                "echoed": float(echoed.exit_code == 7 and echoed.stdout == "x" * 10**6 and echoed.stderr == "odd\n"),
                "late": float(late.exit_code is None),
                "loud": float(loud.exit_code is None and len(loud.stdout) == 2**20),
                "missing": float(missing.exit_code == 127),
                "killed": float(killed.exit_code == 137),
            }

    own = RewardPool({"it": Runs()}, workers=1, timeout_s=30, isolated=True)
    own.start()
    score = judge(own, "x")
    assert score.status == "ok" and set(score.parts.values()) == {1.0}, score
    asyncio.run(own.close())


def test_without_bubblewrap_programs_are_children_that_cannot_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "find_bwrap", lambda: None)
    assert "bubblewrap" in " ".join(isolation.isolation_of(True)[1])
    own = RewardPool({"it": Judged()}, workers=1, timeout_s=30, memory_bytes=MEMORY_BYTES, isolated=True)
    own.start()
    duration = f"8{os.getpid()}"
    found = [printed(own, f"sandbox {script}") for script in ("take_over", "find_secret", "nested")]
    judge(own, f"sandbox stay {duration}")
    asyncio.run(own.close())
    assert found == ["[]", "0", "-1"]


@pytest.mark.parametrize("wanted", [True, "best-effort"])
def test_machine_without_namespaces(monkeypatch: pytest.MonkeyPatch, wanted: bool | str) -> None:
    """It is refused, unless the user accepts less isolation."""
    monkeypatch.setattr(isolation, "why_not", lambda needed=(): "no namespaces")
    if wanted is True:
        with pytest.raises(HardwareError, match="no namespaces"):
            isolation.isolation_of(wanted)
        return
    isolated, notices = isolation.isolation_of(wanted)
    assert not isolated and "not isolated" in notices[0]


def test_programs_require_isolation() -> None:
    with pytest.raises(RuntimeError, match="isolated"):
        run_code(["true"])
