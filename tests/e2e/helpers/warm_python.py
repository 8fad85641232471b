"""A Python that has imported the modules of the commands and forks one process per command, which saves start-up time.

`processes.WarmPython` runs this script. Requests are JSON, one per line on stdin, and answers are JSON lines on
stdout. A request may name a place (`shoal.runs.files.fault`), the number of the pass, and an effect: SIGKILL, a hang,
a disk that fails or is full, or a clock change. A request starts a command of Shoal or any arguments of Python: a
script, a module after -m, or code after -c. It may request spares: waiting child processes, which become the processes
of Shoal that the command starts. `values` sets constants of modules first, such as shorter timeouts.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.cli.entry import main
from shoal.runs import files as atomic

# Modules that `shoal grpo`, `sft` and `eval` import when they start to work.
HEAVY = (
    "shoal.api", "shoal.build", "shoal.engine.engine", "shoal.models.lora", "shoal.models.sampler_view",
    "shoal.rollout.embedded", "shoal.core.runner", "shoal.trainer.checkpoint", "shoal.trainer.supervised",
    "shoal.rollout.weight_channels", "shoal.split.weight_broadcast", "shoal.core.objective", "shoal.split.commands",
    "shoal.split.inference_process", "shoal.rollout.remote.shoal", "peft", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip


def serve() -> Callable[[], int]:
    """Fork until stdin ends. Returns only in a child, with its arguments."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    say({"ready": True})
    pending = b""
    while True:
        ready, _, _ = select.select([0, reading], [], [])
        if reading in ready:
            os.read(reading, 1 << 10)
            report_ends()
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                os._exit(0)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    os.close(reading)
                    os.close(writing)
                    return become(request)
                say({"started": request["number"], "pid": pid})


def report_ends() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def become(request: dict[str, Any]) -> Callable[[], int]:
    """Become a process as started from a command line: own session, folder, environment, output and signals."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[1:1] = [folder for folder in request["env"].get("PYTHONPATH", "").split(os.pathsep) if folder]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = list(request["argv"]) if request["python"] else ["shoal", *request["argv"]]
    for module, values in request["values"].items():
        for name, value in values.items():
            getattr(import_module(module), name)  # it exists
            setattr(import_module(module), name, value)
    if keep_spares(*request["spares"]):
        return run_python
    if request["faults"] or request["trace"]:
        atomic.set_fault_hook(at_places(request["faults"], request["trace"]))
    return run_python if request["python"] else lambda: main(sys.argv[1:])


def keep_spares(number: int = 0, *below: int) -> bool:
    """Fork children before this process changes. Each waits to become a `python -m shoal…` that `subprocess` starts.
    Without spares, processes start normally. `below`: the number of spares of each child. Returns True in a child.
    """
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(number):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for _, other in spares:
                other.close()
            ours.close()
            be_started(theirs)
            keep_spares(*below)
            return True
        theirs.close()
        spares.append((pid, ours))
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(start)

    def start_in_spare(self: Any, *values: Any) -> None:
        given = signature.bind(self, *values).arguments
        words = given["args"] if isinstance(given["args"], list | tuple) else []
        ours = list(words[:2]) == [sys.executable, "-m"] and words[2].startswith("shoal")
        if not ours or not spares:
            start(self, *values)
            return
        self.pid, channel = spares.pop(0)
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "argv": words[1:], "cwd": given["cwd"] or str(Path.cwd()), "env": dict(given["env"] or os.environ),
            "new_session": given["start_new_session"],
        }  # fmt: skip
        fds = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        socket.send_fds(channel, [json.dumps(request).encode()], fds)
        channel.close()
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))

    if spares:
        subprocess.Popen._execute_child = start_in_spare  # type: ignore[attr-defined]
    return False


def be_started(channel: socket.socket) -> None:
    """Wait for the request of the parent. End if the parent ends without a request."""
    data, fds, _, _ = socket.recv_fds(channel, 1 << 18, 3)
    channel.close()
    if not data:
        os._exit(0)
    request = json.loads(data)
    for number, stream in enumerate(fds):
        os.dup2(stream, number)
        os.close(stream)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if rank := request["env"].get("RANK"):
        Path("/proc/self/comm").write_text(f"rank {rank}")  # for `rank_of`: /proc/self/environ belongs to the parent
    sys.argv = list(request["argv"])


def run_python() -> int:
    """Run `python ARGUMENTS`; returns the exit code."""
    sys.path[0] = str(Path.cwd())
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif sys.argv[0] == "-c":
            text = sys.argv.pop(1)
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[0] = str(Path(sys.argv[0]).parent.resolve())
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def at_places(faults: list[tuple[str, int, str, Any]], trace: str | None) -> Callable[[str], None]:
    """Each entry is a place, the number of the pass, one of EFFECTS and its argument. `trace` records all places in
    order.
    """
    passed: Counter[str] = Counter()

    def hook(name: str) -> None:
        passed[name] += 1
        if trace is not None:
            with Path(trace).open("a") as file:
                file.write(f"{name}\n")
        for place, times, effect, argument in faults:
            if name == place and passed[name] == times:
                EFFECTS[effect](argument)

    return hook


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def hang(marker: str) -> None:
    """Hang like a driver call that never returns. The file `marker` shows that the call hangs."""
    Path(marker).touch()
    time.sleep(3600)


def set_clock(seconds: float) -> None:
    """Set the wall clock of this process. The monotonic clock cannot be set."""
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() + seconds, lambda: real_ns() + int(seconds * 1e9)


def fill_disk(filler: str) -> None:
    with Path(filler).open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


EFFECTS: dict[str, Callable[[Any], None]] = {
    "kill": die, "fail": fail, "hang": hang, "clock": set_clock, "fill": fill_disk,
}  # fmt: skip


def leave(code: int) -> None:
    """Exit without tearing down the imported modules, which takes seconds in a forked process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # not this folder, which contains modules of the tests
    for module in HEAVY:
        import_module(module)
    gc.collect()
    gc.freeze()  # imported objects are never garbage; a collection would copy their pages into every child
    leave(serve()())
