"""An environment whose rewards misbehave as the answer says, and the requests of the pool tests."""

import asyncio
import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shoal.envs import SingleTurn, answer_of, ask
from shoal.rewards.worker import RESULT, STARTED, pack

TIMEOUT_S = 0.5


def job_id() -> bytes:
    """The id of the running job, read from the memory of the worker."""
    frame = sys._getframe()
    while frame.f_code.co_name != "serve":
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["frame"].job


class Misbehaving(SingleTurn):
    """Does what the answer says. Writes process ids into `self.folder`."""

    weights = {"heavy": 10.0}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret: Any = lambda: 0.75  # a closure cannot be pickled, and need not be

    def tasks(self, split):
        return [ask("what?", answer=1)] * 3

    def reward(self, task, messages):
        return getattr(self, answer_of(messages))()

    def note(self) -> None:
        (self.folder / f"pid-{os.getpid()}").touch()

    def closure(self):
        return self.secret()

    def true(self):
        return True

    def none(self):
        return None

    def parts(self):
        return {"plain": 0.5, "heavy": 0.25}

    def slow(self):
        time.sleep(0.3)
        return 1

    def hang(self):
        self.note()
        while True:
            time.sleep(1)

    def spin(self):
        while True:
            pass

    def fork_and_return(self):
        if os.fork() == 0:
            self.note()
            time.sleep(600)
        while not list(self.folder.iterdir()):
            time.sleep(0.01)
        return 1

    def escape(self):
        """A grandchild in a separate session, whose parent ends."""
        self.note()
        touch = f"pathlib.Path({str(self.folder)!r}, f'pid-{{os.getpid()}}').touch()"
        script = f"import os, pathlib, time; {touch}; time.sleep(600)"
        subprocess.Popen(["sh", "-c", f'setsid {sys.executable} -c "$0" & exit 0', script])
        while len(list(self.folder.iterdir())) < 2:
            time.sleep(0.01)
        return self.hang()

    def fork_many_and_hang(self):
        for _ in range(20):
            if os.fork() == 0:
                self.note()
                time.sleep(600)
        return self.hang()

    def leave_thread(self):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        return 1

    def allocate(self):
        return len(bytearray(8 * 2**30))

    def segfault(self):
        ctypes.string_at(0)

    def exit_hard(self):
        os._exit(0)

    def exit_soft(self):
        sys.exit(3)

    def interrupt(self):
        raise KeyboardInterrupt

    def flood(self):
        for _ in range(40):
            print("x" * 2**20)
            print("y" * 2**20, file=sys.stderr)
            os.write(1, b"z" * 2**20)
        return 1

    def forge(self):
        """Writes a forged score into the pipe before the worker's score."""
        forged = json.dumps({"status": "ok", "reward": float("nan"), "parts": {}}).encode()
        for descriptor in (int(entry.name) for entry in list(Path("/dev/fd").iterdir())):
            with contextlib.suppress(OSError):
                os.write(descriptor, pack(job_id(), RESULT, forged))
        return 1

    def text(self):
        return "1.0"

    def nan(self):
        return float("nan")

    def infinite(self):
        return float("-inf")

    def huge(self):
        return 1e30

    def a_list(self):
        return [1.0, 0.0]

    def bad_part(self):
        return {"plain": "good"}

    def coroutine(self):
        async def later():
            return 1.0

        return later()

    def unprintable(self):
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError

        raise Odd

    def long_error(self):
        raise ValueError("x" * 10**7)

    def secrets(self):
        return {name: 1 for name in os.environ if name.startswith("SHOAL_TEST")}

    def extend(self):
        """Repeats the frame that reports the start of the job."""
        until = time.monotonic() + 20 * TIMEOUT_S
        while time.monotonic() < until:
            for descriptor in range(3, 64):
                with contextlib.suppress(OSError):
                    os.write(descriptor, pack(job_id(), STARTED))
            time.sleep(TIMEOUT_S / 5)

    def patch(self):
        """Makes every later reply of this process invalid."""
        json.dumps = lambda value, **_: "nonsense"
        return 1

    def stop_server(self):
        os.kill(os.getppid(), signal.SIGSTOP)
        return 1

    def kill_server(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    def stop_all(self):
        """Stops the keeper of the server, and the server."""
        keeper = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        self.note()
        for pid in (keeper, os.getppid()):
            (self.folder / f"pid-{pid}").touch()
            os.kill(pid, signal.SIGSTOP)
        time.sleep(600)

    def hop(self):
        """A chain of processes: each starts the next in a new session and ends."""
        script = 'touch "$0/hop"; exec setsid sh -c "$1" "$0" "$1" &'
        subprocess.Popen(["setsid", "sh", "-c", script, str(self.folder), script])
        while not (self.folder / "hop").exists():
            time.sleep(0.01)
        return self.hang()

    def patch_library(self):
        """Changes what later rewards compute, without an error."""
        math.isclose = lambda *_, **__: True
        return 1

    def patch_self(self):
        setattr(type(self), "true", lambda self: 0.25)  # noqa: B010
        return 1

    def close(self):
        return float(math.isclose(1.0, 2.0))

    def patch_to_fail(self):
        """Makes later rewards of this process fail."""
        self.secret = None
        type(self).weights.clear()
        raise ValueError

    def foreign_frame(self):
        """Sends a good result for another job."""
        reply = json.dumps({"status": "ok", "reward": 1.0}).encode()
        for descriptor in range(3, 4096):
            with contextlib.suppress(OSError):
                os.write(descriptor, pack(bytes(16), RESULT, reply))
        return self.hang()

    def close_all(self):
        os.closerange(3, 4096)
        time.sleep(600)

    def corrupt(self):
        """Writes random bytes into every descriptor that it can find."""
        for descriptor in range(3, 4096):  # for any number of files that were open when the server was forked
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\xff" * 64)
        time.sleep(600)


class Async(SingleTurn):
    def tasks(self, split):
        return [ask("what?")]

    async def reward(self, task, messages):
        await asyncio.sleep(0.01)
        return 0.5


def ask_pool(pool, *answers, env="bad"):
    async def run():
        say = [[{"role": "assistant", "content": answer}] for answer in answers]
        return await asyncio.gather(*(pool.score(env, "train", 0, messages) for messages in say))

    return asyncio.run(run())


def noted_pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.iterdir() if path.name.startswith("pid-")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids, within_s=5.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
