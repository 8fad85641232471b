"""One reward worker: takes a job, says that it starts, calls the environment's reward, sends the outcome, repeats.

Forked by `server.py` with every environment and task already in memory. Whatever the reward does here, up to and
including ending this process, costs the one job and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.rewards import confine
from shoal.rewards.isolate import isolate
from shoal.rewards.outcome import RewardValueError, call, read_outcome
from shoal.rewards.wire import JOB, LAST_RESULT, MAX_JOB_BYTES, RESULT, STARTED, FrameBuffer, pack
from shoal.types import Task

MAX_ERROR_CHARS = 2000
MAX_JOBS = 1000  # then a fresh process, against graders that leak


@dataclass(frozen=True, slots=True)
class Judging:
    """All a worker needs to know: environments, their tasks by (environment, split), weights of reward parts."""

    environments: Mapping[str, Any]
    tasks: Mapping[tuple[str, str], Sequence[Task]]
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a worker may have, and whose child it is."""

    memory_bytes: int
    isolated: bool
    server_pid: int


def serve(channel: socket.socket, judging: Judging, max_jobs: int = MAX_JOBS) -> None:
    """Work until the server closes the channel or this process is not fit for another job."""
    frames = FrameBuffer(MAX_JOB_BYTES)
    done = 0
    while data := channel.recv(1 << 16):
        for frame in frames.feed(data):
            if frame.kind != JOB:
                continue
            channel.sendall(pack(frame.job, STARTED))
            outcome = score(judging, frame.body)
            done += 1
            fit = done < max_jobs and _is_clean()
            channel.sendall(pack(frame.job, RESULT if fit else LAST_RESULT, json.dumps(outcome).encode()))
            if not fit:
                return


def score(judging: Judging, body: bytes) -> dict[str, Any]:
    """The outcome of one job as JSON-ready fields of `Score`."""
    began = time.perf_counter()
    outcome: dict[str, Any]
    try:
        job = json.loads(body)
        environment = judging.environments[job["env"]]
        task = judging.tasks[job["env"], job["split"]][job["index"]]
        value = call(environment.reward, task, job["messages"])
        reward, parts = read_outcome(value, judging.weights.get(job["env"], {}))
        outcome = {"status": "ok", "reward": reward, "parts": parts}
    except BaseException as error:  # SystemExit too: a reward that calls exit() failed, it did not finish
        outcome = {"status": "error", "error": describe(error)}
    return {**outcome, "seconds": time.perf_counter() - began}


def describe(error: BaseException) -> str:
    """`ValueError: text (file.py:12 in grade)`, with the innermost place in the user's code, if it was raised there."""
    try:
        frames = [] if isinstance(error, RewardValueError) else traceback.extract_tb(error.__traceback__)
        inner = frames[-1] if frames else None
        place = f" ({Path(inner.filename).name}:{inner.lineno} in {inner.name})" if inner else ""
        return f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}{place}"
    except Exception:  # an exception whose own __str__ fails
        return type(error).__name__


def _is_clean() -> bool:
    """Whether the reward left nothing running behind it. Any alarm it left is switched off."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    if threading.active_count() > 1:
        return False
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False  # it still has children


def become_worker(channel: socket.socket, judging: Judging, confinement: Confinement) -> None:
    """What a freshly forked process runs: confine itself, serve, end. Never returns."""
    code = 1
    try:
        os.setsid()
        confine.reset_signals()
        confine.die_with_parent()
        if os.getppid() != confinement.server_pid:  # the server ended before the line above took hold
            os._exit(1)
        os.register_at_fork(after_in_child=confine.die_with_parent)
        confine.limit_memory(confinement.memory_bytes)
        if confinement.isolated:
            isolate()
        # What a model wrote may have changed its process: the next job gets another.
        serve(channel, judging, 1 if confinement.isolated else MAX_JOBS)
        code = 0
    finally:
        os._exit(code)
