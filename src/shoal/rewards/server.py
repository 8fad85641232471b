"""The reward server: forked by the keeper. It starts and kills workers, and runs no reward itself.

It queues jobs and gives each worker one at a time. It sets a job's deadline when it sends the job, and the report that
the work starts can only bring the deadline forward. A long queue or a busy main process causes no timeout. A worker
that is much slower than most gets a substitute, so a few hanging rewards do not hold up the others.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from shoal.rewards import cgroups, sandbox
from shoal.rewards.isolation import MAX_PROCESSES
from shoal.rewards.outcome import INVALID_REPLY, parse_reply
from shoal.rewards.run_code import Sandboxes
from shoal.rewards.worker import (
    CALL,
    CLOSE,
    JOB,
    LAST_RESULT,
    MAX_JOB_BYTES,
    MAX_REPLY_BYTES,
    NO_JOB,
    OPEN,
    PING,
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
END_LIMIT_S = 3.0
CLOSED_LIMIT_S = 1.0
ENVIRONMENT_CLOSE_LIMIT_S = 5.0  # for `close` of a stateful environment, and for a call that must end before it
END_CLOSE_LIMIT_S = 2.0  # the same at the end of the run
CLOSED = b'{"status": "ok"}'  # the outcome of CLOSE if there is nothing to close
STALL_S = 0.5
MAX_FORGIVEN = 3  # suspensions of the server for which one job gets more time
SLOW_S = 0.1  # no call that is shorter than this gets a substitute,
UNKNOWN_SLOW_S = 1.0  # or than this while few durations are known
SLOW_FACTOR = 4.0  # times the duration that nine of ten calls do not exceed
SUBSTITUTES = 32
RECENT = 64


@dataclass(frozen=True, slots=True)
class Limits:
    workers: int
    timeout_s: float
    memory_bytes: int
    isolated: bool = False  # a new process in its own namespaces for each job
    call_timeout_s: float = 60.0  # of each call of a stateful environment


@dataclass(slots=True)
class Worker:
    pid: int
    channel: socket.socket
    frames: FrameBuffer
    job: bytes | None = None
    unsent: bytearray = field(default_factory=bytearray)
    started: bool = False
    since: float = 0.0  # when the work started, or when the job was sent if it has not started
    deadline: float = 0.0  # set when the job is sent; the start of the work can only bring it forward
    forgiven: int = 0
    slow: bool = False
    groups: list[Path] = field(default_factory=list)
    sandboxes: Sandboxes | None = None
    what: str = "the reward"  # for messages
    keeps: bool = False  # it belongs to a stateful environment; `job` is its OPEN, `deadline` is infinite between calls
    closing: bool = False

    @property
    def busy(self) -> bool:
        return self.job is not None and self.deadline < math.inf


class Server:
    def __init__(self, control: socket.socket, judging: Judging, limits: Limits) -> None:
        self._control = control
        self._judging = judging
        self._limits = limits
        self._parent = os.getppid()
        self._jobs: deque[Frame] = deque()
        self._requests = FrameBuffer(MAX_JOB_BYTES)
        self._workers: dict[int, Worker] = {}
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._selector = selectors.DefaultSelector()
        self._dying: set[int] = set()
        self._unsent = bytearray()
        self._stopping = False
        self._last_sweep = 0.0
        self._forked = 0
        self._old_groups: list[Path] = []

    def run(self) -> None:
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ)
        last = time.monotonic()
        while not self._stopping and os.getppid() == self._parent:
            busy = bool(self._dying) or any(worker.busy for worker in self._workers.values())
            events = self._selector.select(TICK_S if busy else 1.0)
            now = time.monotonic()
            if now - last > TICK_S + STALL_S and busy:
                self._extend_deadlines_by(now - last)
            last = now
            # Read results before checking timeouts: a result that has arrived is not late.
            for key, mask in events:
                if key.fileobj is self._control:
                    if mask & selectors.EVENT_READ:
                        self._read_control()
                elif key.data.sandboxes is not None and key.fileobj is key.data.sandboxes.requests:
                    if not key.data.sandboxes.read():
                        self._unregister(key.data.sandboxes.requests)
                elif mask & selectors.EVENT_READ:
                    self._read_worker(key.data)
                elif key.data.pid in self._workers:
                    self._write_worker(key.data)
            self._flush()
            self._check_workers(now)
            self._dispatch()
        self._end()

    def _extend_deadlines_by(self, gap_s: float) -> None:
        """Extend deadlines by the time this process was suspended. Not without end: a reward can suspend it."""
        for worker in self._workers.values():
            if worker.busy and worker.forgiven < MAX_FORGIVEN:
                worker.since += gap_s
                worker.deadline += gap_s
                worker.forgiven += 1

    def _read_control(self) -> None:
        try:
            data = self._control.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self._stopping = True
            return
        for frame in self._requests.feed(data):
            if frame.kind == PING:
                self._reply(frame)
            elif frame.kind == JOB:
                self._jobs.append(frame)
            elif frame.kind == OPEN:  # the pool limits their number
                self._give(self._fork(), frame)
            elif frame.kind in (CALL, CLOSE):
                self._pass_on(frame)

    def _pass_on(self, frame: Frame) -> None:
        """Pass a frame on to the worker of a stateful environment."""
        worker = next((worker for worker in self._workers.values() if worker.keeps and worker.job == frame.job), None)
        if worker is None and frame.kind == CLOSE:
            self._reply(Frame(frame.job, LAST_RESULT, CLOSED))
        elif worker is None:
            self._reply_error(frame.job, "error", "the process of the environment has ended")
        elif frame.kind == CLOSE:
            self._close(worker, ENVIRONMENT_CLOSE_LIMIT_S)
        else:
            worker.since, worker.forgiven = time.monotonic(), 0
            worker.deadline = worker.since + self._limits.call_timeout_s
            self._reply(Frame(frame.job, STARTED, b""))
            worker.unsent += pack(*frame)
            self._write_worker(worker)

    def _close(self, worker: Worker, limit_s: float) -> None:
        """Have a worker close its environment. A call that runs is interrupted."""
        if worker.closing:
            return
        if worker.busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)
        worker.closing, worker.deadline = True, time.monotonic() + limit_s
        worker.unsent += pack(worker.job or NO_JOB, CLOSE)
        self._write_worker(worker)

    def _read_worker(self, worker: Worker) -> None:
        try:
            data = worker.channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # it ended, which _check_workers detects, or it closed the connection
            self._unregister(worker.channel)
            worker.deadline = min(worker.deadline, time.monotonic() + CLOSED_LIMIT_S)
            if worker.job is None:
                self._remove(worker)
            return
        try:
            for frame in worker.frames.feed(data):
                self._on_frame(worker, frame)
        except OversizedFrame:
            self._fail(worker, "error", f"the result of {worker.what} is larger than {MAX_REPLY_BYTES:,} bytes")

    def _on_frame(self, worker: Worker, frame: Frame) -> None:
        if worker.pid not in self._workers:
            return
        if frame.job != worker.job or frame.kind not in (STARTED, RESULT, LAST_RESULT):
            self._fail(worker, "error", INVALID_REPLY)  # reward code changed this process: it gets no other job
            return
        if frame.kind == STARTED:
            if not worker.started:
                worker.started, worker.since = True, time.monotonic()
                worker.deadline = min(worker.deadline, worker.since + self._limit_s(worker))
            return
        try:
            parse_reply(frame.body)
        except ValueError:
            self._fail(worker, "error", INVALID_REPLY)
            return
        if worker.keeps and frame.kind == RESULT:
            if not worker.closing:
                worker.deadline = math.inf
                self._reply(frame)
            return
        if not worker.keeps:
            self._durations.append(time.monotonic() - worker.since)
        worker.job = None
        self._reply(Frame(frame.job, LAST_RESULT if worker.keeps else RESULT, frame.body))
        if frame.kind == LAST_RESULT or worker.slow:
            self._remove(worker)

    def _limit_s(self, worker: Worker) -> float:
        return self._limits.call_timeout_s if worker.keeps else self._limits.timeout_s

    def _check_workers(self, now: float) -> None:
        slow_s = self._slow_s()
        for worker in list(self._workers.values()):
            if worker.sandboxes is not None:
                worker.sandboxes.reap()
            end = sandbox.end_of(worker.pid)
            if end is not None:
                self._read_rest(worker)
                if worker.job is not None and worker.closing and not worker.started:  # it created nothing
                    self._reply(Frame(worker.job, LAST_RESULT, CLOSED))
                    self._remove(worker)
                elif worker.job is not None:
                    self._fail(worker, "error", f"{worker.what} ended its process: {end}")
                elif worker.pid in self._workers:
                    self._remove(worker)
            elif worker.job is None:
                continue
            elif now > worker.deadline and worker.closing:
                self._fail(worker, "error", "the environment did not close in time, and was killed")
            elif now > worker.deadline and worker.started:
                self._fail(worker, "timeout", f"{worker.what} took longer than {self._limit_s(worker):g} s")
            elif now > worker.deadline:
                self._fail(worker, "error", f"the reward worker did not start within {START_LIMIT_S:g} s")
            elif self._jobs and not worker.slow and not worker.keeps and now - worker.since > slow_s:
                self._substitute(worker)
        # This process adopts a worker's children when the worker ends, so sweep then.
        if self._reap_dying() or now - self._last_sweep > SWEEP_S:
            self._sweep()

    def _read_rest(self, worker: Worker) -> None:
        """Read what a worker sent before it ended."""
        with contextlib.suppress(OSError, KeyError, OversizedFrame):
            while data := worker.channel.recv(1 << 16):
                for frame in worker.frames.feed(data):
                    self._on_frame(worker, frame)

    def _fail(self, worker: Worker, status: str, error: str) -> None:
        seconds = time.monotonic() - worker.since if worker.started else 0.0
        job, kind = worker.job, RESULT
        if worker.keeps and status == "timeout" and not worker.closing:
            self._close(worker, ENVIRONMENT_CLOSE_LIMIT_S)
        else:
            kind = LAST_RESULT if worker.keeps else RESULT
            worker.job = None
            self._remove(worker)
        if job is not None:
            self._reply_error(job, status, error, seconds, kind)

    def _slow_s(self) -> float:
        """How long a call may take before another worker starts beside it, from the durations of recent calls."""
        usual = sorted(self._durations)
        if len(usual) < RECENT // 8:
            return max(UNKNOWN_SLOW_S, self._limits.timeout_s / 2)
        return max(SLOW_S, SLOW_FACTOR * usual[int(0.9 * len(usual))])

    def _substitute(self, worker: Worker) -> None:
        """Let another worker start beside this one, which keeps its job until the deadline at the lowest priority."""
        if sum(other.slow for other in self._workers.values()) < SUBSTITUTES:
            worker.slow = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, worker.pid, 19)

    def _remove(self, worker: Worker) -> None:
        """Kill a worker and its process group. The next job that needs a worker starts a new one."""
        self._workers.pop(worker.pid, None)
        self._unregister(worker.channel)
        worker.channel.close()
        if worker.sandboxes is not None:
            self._unregister(worker.sandboxes.requests)
            self._dying.update(worker.sandboxes.end())
        self._old_groups += worker.groups
        # Kill before reaping: until then the process id cannot be reused.
        sandbox.kill_group(worker.pid)
        self._dying.add(worker.pid)

    def _unregister(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def _reap_dying(self) -> bool:
        """Reap killed children. True if one was reaped."""
        gone = {pid for pid in self._dying if sandbox.reap(pid)}
        self._dying -= gone
        self._old_groups = cgroups.remove(self._old_groups)
        return bool(gone)

    def _sweep(self) -> None:
        """Kill adopted processes: children that this process did not fork."""
        self._last_sweep = time.monotonic()
        known = {*self._workers, *self._dying}
        for worker in self._workers.values():
            known.update(worker.sandboxes.running.values() if worker.sandboxes is not None else ())
        adopted = [pid for pid in sandbox.children() if pid not in known]
        for pid in adopted:
            sandbox.kill_group(pid)
        self._dying.update(adopted)

    def _dispatch(self) -> None:
        idle = [worker for worker in self._workers.values() if worker.job is None]
        working = sum(not worker.slow and not worker.keeps for worker in self._workers.values())
        while self._jobs and (idle or working < self._limits.workers):
            working += not idle
            self._give(idle.pop() if idle else self._fork(), self._jobs.popleft())

    def _give(self, worker: Worker, frame: Frame) -> None:
        worker.job, worker.started, worker.forgiven, worker.since = frame.job, False, 0, time.monotonic()
        if frame.kind == OPEN:
            worker.keeps, worker.what = True, "the environment"
        worker.deadline = worker.since + START_LIMIT_S + self._limit_s(worker)
        self._reply(Frame(frame.job, STARTED, b""))
        worker.unsent += pack(*frame)
        self._write_worker(worker)

    def _write_worker(self, worker: Worker) -> None:
        """Send without blocking: a worker that does not read must not hold up the others."""
        try:
            while worker.unsent:
                del worker.unsent[: worker.channel.send(worker.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(worker, "error", f"the reward worker does not accept jobs: {error}")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        with contextlib.suppress(KeyError):
            if self._selector.get_key(worker.channel).events != wanted:
                self._selector.modify(worker.channel, wanted, worker)

    def _fork(self) -> Worker:
        ours, theirs = socket.socketpair()
        server_pid, limits = os.getpid(), self._limits
        self._forked += 1
        groups: list[Path] = []
        requests = None, None
        if limits.isolated:
            groups = cgroups.create(f"shoal-{self._parent}-{self._forked}", limits.memory_bytes, MAX_PROCESSES)
            requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for worker in self._workers.values():
                worker.channel.close()
                if worker.sandboxes is not None:
                    worker.sandboxes.requests.close()
            for connection in (ours, self._control, requests[0]):
                if connection is not None:
                    connection.close()
            self._selector.close()
            confinement = Confinement(limits.memory_bytes, server_pid, limits.isolated, groups, requests[1])
            become_worker(theirs, self._judging, confinement)
        theirs.close()
        ours.setblocking(False)
        worker = Worker(pid, ours, FrameBuffer(MAX_REPLY_BYTES), groups=groups)
        self._workers[pid] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)
        if requests[0] is not None and requests[1] is not None:
            requests[1].close()
            requests[0].setblocking(False)
            worker.sandboxes = Sandboxes(requests[0], groups, limits.memory_bytes)
            self._selector.register(requests[0], selectors.EVENT_READ, worker)
        return worker

    def _reply_error(self, job: bytes, status: str, error: str, seconds: float = 0.0, kind: int = RESULT) -> None:
        body = json.dumps({"status": status, "error": error, "seconds": seconds}).encode()
        self._reply(Frame(job, kind, body))

    def _reply(self, frame: Frame) -> None:
        self._unsent += pack(*frame)
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
        """Let stateful environments close, then kill all workers and descendants."""
        keeping = [worker for worker in self._workers.values() if worker.keeps]
        for worker in keeping:
            self._close(worker, END_CLOSE_LIMIT_S)
        deadline = time.monotonic() + END_CLOSE_LIMIT_S
        while any(sandbox.end_of(worker.pid) is None for worker in keeping) and time.monotonic() < deadline:
            time.sleep(0.01)
        for worker in list(self._workers.values()):
            self._remove(worker)
        sandbox.end_descendants(END_LIMIT_S)


def become_server(control: socket.socket, judging: Judging, limits: Limits, parent: int) -> None:
    """Run the server in the forked process. Never returns."""
    code = 1
    try:
        os.setsid()
        sandbox.adopt_orphans()
        sandbox.wake_at_parent_death(signal.SIGCONT)
        if os.getppid() == parent:
            Server(control, judging, limits).run()
        code = 0
    finally:
        os._exit(code)
