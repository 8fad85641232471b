"""A reward worker process, and the frames between pool, server and workers.

The server forks workers with all environments and tasks in memory. A worker receives a job, reports its start, calls
the reward and sends the outcome. A reward that ends the process loses only its own job. A worker that receives OPEN
belongs to one stateful environment until that is closed. A frame is a length, a job id, a kind and JSON text; received
data is never executed. Job ids are random: only the receiver of a job can answer it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, dropwhile
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.types import Task
from shoal.rewards import cgroups, isolation, run_code, sandbox
from shoal.rewards.outcome import RewardError, RewardValueError, call, read_score

HEADER = struct.Struct("!I16sB")
MAX_JOB_BYTES = 64 * 2**20
MAX_REPLY_BYTES = 2**20

JOB = 0  # pool → server → worker: a job to score
STARTED = 1  # worker → server: the work starts, and with it the timeout; server → pool: a worker has the job
RESULT = 2  # worker → server → pool: the outcome
LAST_RESULT = 3  # an outcome from a worker that must be replaced; to the pool: of an environment that has ended
PING = 4  # pool → server → pool: the server is alive
OPEN = 5  # pool → server → worker: start a stateful environment
CALL = 6  # pool → server → worker: call it; the job id is that of OPEN
CLOSE = 7  # pool → server → worker: close it, and end the worker
NO_JOB = bytes(16)


class Frame(NamedTuple):
    job: bytes
    kind: int
    body: bytes


class OversizedFrame(ValueError):
    """A frame announces more bytes than the reader accepts."""


def pack(job: bytes, kind: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), job, kind) + body


class FrameBuffer:
    """Splits a byte stream into frames."""

    def __init__(self, max_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            length, job, kind = HEADER.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise OversizedFrame(f"a frame of {length:,} bytes; the limit is {self._max_bytes:,}")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield Frame(job, kind, body)


MAX_ERROR_CHARS = 2000
MAX_JOBS = 1000  # then the worker is replaced, because graders may leak memory


@dataclass(frozen=True, slots=True)
class Judging:
    """What a worker needs: environments, their tasks by (environment, split), weights of reward parts."""

    environments: Mapping[str, Any]
    tasks: Mapping[tuple[str, str], Sequence[Task]]
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None  # taken before workers are forked: in each of them it would copy memory


@dataclass(frozen=True, slots=True)
class Confinement:
    """Limits of a worker, and the id of its parent process."""

    memory_bytes: int
    server_pid: int
    isolated: bool = False
    groups: Sequence[Path] = ()  # control groups to join
    requests: socket.socket | None = None  # to the server, which starts programs for `run_code`


def serve(channel: socket.socket, judging: Judging, max_jobs: int = MAX_JOBS) -> None:
    """Process jobs until the server closes the channel or this worker must be replaced."""
    done = 0
    frames = _receive(channel)
    for frame in frames:
        if frame.kind == OPEN:
            keep_environment(channel, judging, chain([frame], frames))
            return
        if frame.kind != JOB:
            continue
        channel.sendall(pack(frame.job, STARTED))
        outcome = score(judging, frame.body)
        done += 1
        # After an error the process is not trusted: what the reward changed may make each later one fail.
        fit = done < max_jobs and outcome["status"] == "ok" and _is_clean() and _is_unchanged(judging)
        channel.sendall(pack(frame.job, RESULT if fit else LAST_RESULT, json.dumps(outcome).encode()))
        if not fit:
            return


def _receive(channel: socket.socket) -> Iterator[Frame]:
    frames = FrameBuffer(MAX_JOB_BYTES)
    while data := channel.recv(1 << 16):
        yield from frames.feed(data)


def score(judging: Judging, body: bytes) -> dict[str, Any]:
    """Score one job. Returns the fields of `Score`, ready for JSON."""

    def make() -> dict[str, Any]:
        job = json.loads(body)
        environment = judging.environments[job["env"]]
        task = judging.tasks[job["env"], job["split"]][job["index"]]
        weights = judging.weights.get(job["env"], {})
        if "group" in job:
            return {"group": _score_group(environment, task, job["group"], weights)}
        return read_score(call(environment.reward, task, job["messages"]), weights)

    return _outcome(make)


def _outcome(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What user code returned, or its error, ready for JSON."""
    began = time.perf_counter()
    outcome: dict[str, Any]
    try:
        outcome = {"status": "ok", **make()}
    except BaseException as error:  # includes SystemExit: a reward that calls exit() has failed
        outcome = {"status": "error", "error": describe(error), "traceback": user_traceback(error)}
    return {**outcome, "seconds": time.perf_counter() - began}


class _Ended(BaseException):
    """The server ends the call that runs."""


def keep_environment(channel: socket.socket, judging: Judging, frames: Iterator[Frame]) -> None:
    """Make the calls of one stateful environment, and close it after an error, CLOSE, SIGTERM or the end of input.

    SIGTERM interrupts a call that takes too long or whose rollout was cancelled.
    """
    live = _LiveEnvironment(judging)
    signal.signal(signal.SIGTERM, live.interrupt)
    job = NO_JOB
    for frame in frames:
        job = frame.job
        if frame.kind == CLOSE:
            break
        channel.sendall(pack(job, STARTED))
        outcome = _outcome(partial(live.make, frame.body))
        channel.sendall(pack(job, RESULT, json.dumps(outcome).encode()))
        if outcome["status"] != "ok":
            break
    channel.sendall(pack(job, LAST_RESULT, json.dumps(_outcome(live.close)).encode()))


class _LiveEnvironment:
    def __init__(self, judging: Judging) -> None:
        self._judging = judging
        self._episode: Any = None
        self._weights: Mapping[str, float] = {}
        self._busy = False

    def interrupt(self, *_: Any) -> None:
        if self._busy:
            self._busy = False
            raise _Ended("the call was ended")

    def make(self, body: bytes) -> dict[str, Any]:
        call = json.loads(body)
        self._busy = True
        try:
            if "env" in call:
                task = self._judging.tasks[call["env"], call["split"]][call["index"]]
                self._weights = self._judging.weights.get(call["env"], {})
                self._episode = self._judging.environments[call["env"]].live(task)
                return {"value": self._episode.open()}
            if "messages" in call:
                return read_score(self._episode.reward(call["messages"]), self._weights)
            return {"value": self._episode.call_tools(call["tools"])}
        finally:
            self._busy = False

    def close(self) -> dict[str, Any]:
        if self._episode is not None:
            self._episode.close()
        return {}


def _score_group(
    environment: Any, task: Task, group: Sequence[Any], weights: Mapping[str, float]
) -> list[dict[str, Any]]:
    values = list(call(environment.reward_group, task, group))
    if len(values) != len(group):
        raise RewardValueError(f"reward_group returned {len(values)} rewards for {len(group)} rollouts")
    return [read_score(value, weights) for value in values]


def describe(error: BaseException) -> str:
    """Format an exception as `ValueError: text (file.py:12 in grade)`, with its innermost frame, except RewardError."""
    try:
        frames = [] if isinstance(error, RewardError) else traceback.extract_tb(error.__traceback__)
        inner = frames[-1] if frames else None
        place = f" ({Path(inner.filename).name}:{inner.lineno} in {inner.name})" if inner else ""
        return f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}{place}"
    except Exception:  # the __str__ of the exception failed
        return type(error).__name__


def user_traceback(error: BaseException) -> str:
    """The traceback of an exception from its first frame outside Shoal, at most MAX_ERROR_CHARS."""
    if isinstance(error, RewardError):
        return ""
    try:
        frames = traceback.extract_tb(error.__traceback__)
        ours = str(Path(__file__).parents[1])
        lines = traceback.format_list(list(dropwhile(lambda frame: frame[0].startswith(ours), frames)))
        return "".join([*lines, *traceback.format_exception_only(error)])[-MAX_ERROR_CHARS:].rstrip()
    except Exception:  # the __str__ of the exception failed
        return ""


def _is_clean() -> bool:
    """True if the reward left no thread and no child process. Also cancels a pending alarm."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    if threading.active_count() > 1:
        return False
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False  # children are left


def _is_unchanged(judging: Judging) -> bool:
    return judging.fingerprint is None or judging.fingerprint.holds()


class Fingerprint:
    """Detects that a reward replaced functions that later rewards in this process depend on.

    Compares, by identity, the functions and classes in common modules, in `shoal.rewards` and in the environments, and
    the current folder. A change costs a new worker, not a reward, so a false alarm is harmless.
    """

    MODULES = frozenset(
        [
            "builtins",
            "json",
            "json.decoder",
            "json.encoder",
            "math",
            "os",
            "re",
            "struct",
            "time",
            "difflib",
            "fractions",
            "decimal",
            "random",
            "statistics",
            "string",
            "subprocess",
            "itertools",
            "functools",
        ]
    )

    def __init__(self, environments: Iterable[Any]) -> None:
        names = [name for name in sys.modules if name in self.MODULES or name.startswith("shoal.rewards")]
        self._modules = {name: sys.modules[name] for name in names}
        owners = [*self._modules.values()]
        for environment in environments:
            module = sys.modules.get(type(environment).__module__)
            owners += [type(environment), environment, *([module] if module is not None else [])]
        spaces = [space for owner in owners if (space := getattr(owner, "__dict__", None)) is not None]
        self._functions = [(space, name, it) for space in spaces for name, it in [*space.items()] if callable(it)]
        self._folder = _folder()

    def holds(self) -> bool:
        return (
            all(space.get(name) is it for space, name, it in self._functions)
            and all(sys.modules.get(name) is module for name, module in self._modules.items())
            and _folder() == self._folder
        )


def _folder() -> Path | None:
    try:
        return Path.cwd()
    except OSError:
        return None


def become_worker(channel: socket.socket, judging: Judging, confinement: Confinement) -> None:
    """Run the worker in a newly forked process. Never returns."""
    code = 1
    try:
        os.setsid()
        sandbox.reset_signals()
        sandbox.die_with_parent()
        if os.getppid() != confinement.server_pid:  # the server ended before the line above took effect
            os._exit(1)
        os.register_at_fork(after_in_child=sandbox.die_with_parent)
        sandbox.limit_memory(confinement.memory_bytes)
        if confinement.isolated:
            cgroups.join(confinement.groups)
            isolation.isolate()
            _enter_process_namespace([channel, confinement.requests])
        if confinement.requests is not None:
            run_code.connect(confinement.requests)
        # Code written by the model may have modified the process, so each job gets a new one.
        serve(channel, judging, 1 if confinement.isolated else MAX_JOBS)
        code = 0
    finally:
        os._exit(code)


def _enter_process_namespace(connections: Iterable[socket.socket | None]) -> None:
    """Go on in a child, the first process of the namespace. This one waits for it and ends alike."""
    pid = os.fork()
    if pid == 0:
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    for connection in connections:
        if connection is not None:
            connection.close()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
