"""Start real commands in their own process: a new Python, or a fork of a warm Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from support.commands import children_of as children_of  # re-exported
from support.ports import free_port

LIMIT_S = 120.0  # far longer than any command of these tests takes on a busy machine
HERE = Path(__file__).parent
USER_CODE = HERE / "user_code"
Fault = tuple[str, int, str, Any]  # a place, the number of the pass, the effect and its argument; see warm_python.py


def environment(**changes: str) -> dict[str, str]:
    """Offline, one thread, the tests' modules on the path, and no other torch settings of this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "PYTEST"))}
    # The settings of this process come last: the tree under test may differ from the installed one.
    path = os.pathsep.join([str(USER_CODE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **changes}


def ranks_environment(world: int, **changes: str) -> list[dict[str, str]]:
    """The variables that a launcher sets in each process."""
    place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [environment(**place, **meeting, **rank, **changes) for rank in own]


@dataclass
class Command:
    """A started command: its process id, its output and its exit code."""

    pid: int
    output: Path
    _poll: Callable[[], int | None]

    def running(self) -> bool:
        return self._poll() is None

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code, or minus the number of the signal that ended it."""
        wait_until(lambda: self._poll() is not None, limit_s, f"the end of process {self.pid}: {self.text()[-2000:]}")
        code = self._poll()
        assert code is not None
        return code

    def send(self, number: int) -> None:
        if self.running():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait(10)

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.is_file() else ""


def wait_until(done: Callable[[], Any], limit_s: float, what: str, pause_s: float = 0.002) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(pause_s)


def start_fresh(arguments: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> Command:
    """Start `python -m shoal …` as a user does."""
    return start_python(["-m", "shoal", *arguments], cwd, env)


def start_python(arguments: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> Command:
    """Start `python …` in a process that shares nothing with this one."""
    output = cwd / f"output-{time.monotonic_ns()}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd, env=dict(env or environment()), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    return Command(process.pid, output, process.poll)


@dataclass
class WarmPython:
    """Forks commands from one process that has imported everything; see warm_python.py."""

    _numbers: Any = field(default_factory=count)
    _pids: dict[int, int] = field(default_factory=dict)  # number of the command → process id
    _running: dict[int, int] = field(default_factory=dict)  # process id → number of the command
    _codes: dict[int, int] = field(default_factory=dict)  # number of the command → exit code
    _ready: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "warm_python.py")],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "started" in answer:
                self._running[answer["pid"]] = answer["started"]
                self._pids[answer["started"]] = answer["pid"]
            elif "ended" in answer:
                self._codes[self._running.pop(answer["ended"])] = answer["code"]
            else:
                self._ready.set()

    def start(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        kill_at: tuple[str, int] | None = None,
        faults: Sequence[Fault] = (),
        trace: Path | None = None,
        output: Path | None = None,
        python: bool = False,
        spares: int | Sequence[int] = 0,
        values: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Command:
        """Start a command of Shoal, or with `python` any arguments of Python. `spares`: how many of its child
        processes are forked too, and of their children. `values`: constants to set, by module.
        """
        assert self._ready.wait(LIMIT_S), "the warm Python did not start"
        number = next(self._numbers)
        output = output or cwd / f"output-{time.monotonic_ns()}.txt"
        faults = [*faults, (*kill_at, "kill", signal.SIGKILL)] if kill_at is not None else faults
        request = {
            "number": number, "argv": list(arguments), "cwd": str(cwd), "env": dict(env or environment()),
            "output": str(output), "faults": faults, "trace": trace and str(trace), "python": python,
            "values": dict(values or {}), "spares": [spares] if isinstance(spares, int) else list(spares),
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        wait_until(lambda: number in self._pids, LIMIT_S, "the start of a command")
        return Command(self._pids[number], output, lambda: self._codes.get(number))

    def run(self, arguments: Sequence[str], cwd: Path, **options: Any) -> Command:
        command = self.start(arguments, cwd, **options)
        command.wait()
        return command

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def rank_of(pid: int) -> int | None:
    """The RANK of a training process, forked or new."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:  # the process ended
        return None
    if name.startswith("rank "):
        return int(name.removeprefix("rank "))
    return next((int(line.removeprefix("RANK=")) for line in variables if line.startswith("RANK=")), None)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
