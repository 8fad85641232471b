"""The reward server: a process forked from the main one before a model is loaded. It starts and kills workers.

It queues jobs and gives each worker one at a time. A job's timeout starts when its work starts, so a long queue or a
busy main process does not cause timeouts. The server itself runs no reward.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from shoal.rewards import sandbox
from shoal.rewards.outcome import INVALID_REPLY, parse_reply
from shoal.rewards.worker import (
    JOB,
    LAST_RESULT,
    MAX_JOB_BYTES,
    MAX_REPLY_BYTES,
    READY,
    RESULT,
    STARTED,
    Confinement,
    Frame,
    FrameBuffer,
    Judging,
    OversizedFrame,
    become_worker,
    pack,
)

TICK_S = 0.05
START_LIMIT_S = 30.0  # from sending a job to a worker until the worker reports its start
SWEEP_S = 2.0
STALL_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    workers: int
    timeout_s: float
    memory_bytes: int
    isolated: bool = False  # a new process in its own namespaces for each job


@dataclass(slots=True)
class Worker:
    pid: int
    channel: socket.socket
    frames: FrameBuffer
    job: int | None = None
    started: bool = False
    since: float = 0.0  # when the work started, or when the job was sent if it has not started


class Server:
    def __init__(self, control: socket.socket, judging: Judging, limits: Limits) -> None:
        self._control = control
        self._judging = judging
        self._limits = limits
        self._parent = os.getppid()
        self._jobs: deque[Frame] = deque()
        self._requests = FrameBuffer(MAX_JOB_BYTES)
        self._workers: dict[int, Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._dying: set[int] = set()
        self._unsent = bytearray()
        self._stopping = False
        self._last_sweep = 0.0

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ)
        last = time.monotonic()
        while not self._stopping and os.getppid() == self._parent:
            busy = bool(self._dying) or any(worker.job is not None for worker in self._workers.values())
            events = self._selector.select(TICK_S if busy else 1.0)
            now = time.monotonic()
            if now - last > TICK_S + STALL_S and busy:
                self._forgive(now - last)
            last = now
            # Read results before checking timeouts: a result that has arrived is not late.
            for key, mask in events:
                if key.fileobj is not self._control:
                    self._read_worker(key.data)
                elif mask & selectors.EVENT_READ:
                    self._read_control()
            self._flush()
            self._check_workers(now)
            self._dispatch()
        self._end()

    def _on_terminate(self, *_: Any) -> None:
        self._stopping = self._stopping or os.getppid() != self._parent

    def _forgive(self, gap_s: float) -> None:
        """Extend deadlines by the time this process was suspended."""
        for worker in self._workers.values():
            worker.since += gap_s

    def _read_control(self) -> None:
        try:
            data = self._control.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self._stopping = True
            return
        self._jobs.extend(frame for frame in self._requests.feed(data) if frame.kind == JOB)

    def _read_worker(self, worker: Worker) -> None:
        try:
            data = worker.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(worker.channel)  # _check_workers detects the exit
            return
        try:
            for frame in worker.frames.feed(data):
                self._on_frame(worker, frame)
        except OversizedFrame:
            self._fail(worker, "error", f"the result of the reward is larger than {MAX_REPLY_BYTES:,} bytes")

    def _on_frame(self, worker: Worker, frame: Frame) -> None:
        if frame.job != worker.job:
            return
        if frame.kind == STARTED:
            if not worker.started:  # once per job: reward code could repeat the frame to extend its time
                worker.started, worker.since = True, time.monotonic()
        elif frame.kind in (RESULT, LAST_RESULT):
            try:
                parse_reply(frame.body)
            except ValueError:  # reward code changed this process: the next job needs another one
                self._fail(worker, "error", INVALID_REPLY)
                return
            worker.job = None
            self._send(frame.job, frame.body)
            if frame.kind == LAST_RESULT:
                self._remove(worker)

    def _check_workers(self, now: float) -> None:
        for worker in list(self._workers.values()):
            end = sandbox.end_of(worker.pid)
            if end is not None:
                self._read_rest(worker)
                if worker.job is not None:
                    self._fail(worker, "error", f"the reward ended its process: {end}")
                elif worker.pid in self._workers:
                    self._remove(worker)
            elif worker.job is not None and worker.started and now - worker.since > self._limits.timeout_s:
                self._fail(worker, "timeout", f"the reward took longer than {self._limits.timeout_s:g} s")
            elif worker.job is not None and not worker.started and now - worker.since > START_LIMIT_S:
                self._fail(worker, "error", f"the reward worker did not start within {START_LIMIT_S:g} s")
        # This process adopts a worker's children when the worker ends, so sweep then.
        if self._reap_dying() or now - self._last_sweep > SWEEP_S:
            self._sweep()

    def _read_rest(self, worker: Worker) -> None:
        """Read what a worker sent before it ended."""
        worker.channel.setblocking(False)
        with contextlib.suppress(OSError, KeyError, OversizedFrame):
            while data := worker.channel.recv(1 << 16):
                for frame in worker.frames.feed(data):
                    self._on_frame(worker, frame)

    def _fail(self, worker: Worker, status: str, error: str) -> None:
        seconds = time.monotonic() - worker.since if worker.started else 0.0
        job, worker.job = worker.job, None
        self._remove(worker)
        if job is not None:
            self._send(job, json.dumps({"status": status, "error": error, "seconds": seconds}).encode())

    def _remove(self, worker: Worker) -> None:
        """Kill a worker and its process group. The next job that needs a worker starts a new one."""
        self._workers.pop(worker.pid, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel)
        worker.channel.close()
        # Kill before reaping: until then the process id cannot be reused.
        sandbox.kill_group(worker.pid)
        self._dying.add(worker.pid)

    def _reap_dying(self) -> bool:
        """Reap killed children. True if one was reaped."""
        gone = {pid for pid in self._dying if sandbox.reap(pid)}
        self._dying -= gone
        return bool(gone)

    def _sweep(self) -> None:
        """Kill adopted processes: children that this process did not fork."""
        self._last_sweep = time.monotonic()
        adopted = [pid for pid in sandbox.children() if pid not in self._workers and pid not in self._dying]
        for pid in adopted:
            sandbox.kill_group(pid)
        self._dying.update(adopted)

    def _dispatch(self) -> None:
        idle = [worker for worker in self._workers.values() if worker.job is None]
        while self._jobs and (idle or len(self._workers) < self._limits.workers):
            worker = idle.pop() if idle else self._fork()
            frame = self._jobs.popleft()
            worker.job, worker.started, worker.since = frame.job, False, time.monotonic()
            try:
                worker.channel.settimeout(START_LIMIT_S)
                worker.channel.sendall(pack(*frame))
            except OSError as error:
                self._fail(worker, "error", f"the reward worker does not accept jobs: {error}")

    def _fork(self) -> Worker:
        ours, theirs = socket.socketpair()
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            for channel in (ours, self._control, *(worker.channel for worker in self._workers.values())):
                channel.close()
            self._selector.close()
            confinement = Confinement(self._limits.memory_bytes, self._limits.isolated, server_pid)
            become_worker(theirs, self._judging, confinement)
        theirs.close()
        worker = Worker(pid, ours, FrameBuffer(MAX_REPLY_BYTES))
        self._workers[pid] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _send(self, job: int, body: bytes) -> None:
        self._unsent += pack(job, RESULT, body)
        self._flush()

    def _flush(self) -> None:
        """Send without blocking: the main process may be busy training."""
        try:
            while self._unsent:
                del self._unsent[: self._control.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._stopping = True
        waiting = selectors.EVENT_WRITE if self._unsent else 0
        if self._selector.get_key(self._control).events != selectors.EVENT_READ | waiting:
            self._selector.modify(self._control, selectors.EVENT_READ | waiting)

    def _end(self) -> None:
        """Kill all workers and descendants."""
        for worker in list(self._workers.values()):
            self._remove(worker)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and (self._dying or sandbox.children()):
            self._sweep()
            time.sleep(0.01)
            self._reap_dying()


def become_server(control: socket.socket, judging: Judging, limits: Limits, keep_env: set[str], parent: int) -> None:
    """Run the server in the forked process. Never returns."""
    code = 1
    try:
        os.setsid()
        sandbox.reset_signals()
        sandbox.wake_at_parent_death()
        if os.getppid() != parent:
            os._exit(1)
        sandbox.adopt_orphans()
        sandbox.silence(keep=control.fileno())
        sandbox.drop_secrets(keep_env)
        control.sendall(pack(0, READY))
        _prepare(judging)
        gc.freeze()  # workers share this memory; garbage collection would copy it
        Server(control, judging, limits).run()
        code = 0
    finally:
        os._exit(code)


def _prepare(judging: Judging) -> None:
    """Call `prepare()` of the environments once for all workers. An error appears again in every job."""
    for environment in judging.environments.values():
        prepare = getattr(environment, "prepare", None)
        if callable(prepare):
            with contextlib.suppress(Exception):
                prepare()
