"""The judge of a run: sends finished conversations to the reward server and brings scores back.

`start()` forks the server, best before threads, CUDA or a model exist: a reward that touches CUDA in a worker forked
later fails, and that is an error of its own job. `score` is then called from one event loop at a time. It never raises
for what a reward does, only where the server itself is gone, and never waits without a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from shoal.errors import ConfigError, HardwareError, RewardServerError
from shoal.observability.watchdog import wait_awake
from shoal.protocols import Environment
from shoal.rewards import confine
from shoal.rewards.isolate import check_isolation
from shoal.rewards.outcome import checked_number
from shoal.rewards.parts import PartCheck
from shoal.rewards.server import START_LIMIT_S, Limits, become_server
from shoal.rewards.wire import JOB, MAX_JOB_BYTES, MAX_REPLY_BYTES, READY, RESULT, FrameBuffer, pack
from shoal.rewards.worker import Judging
from shoal.types import Message, Score

READY_LIMIT_S = 60.0
CLOSE_LIMIT_S = 5.0
END_LIMIT_S = 0.5
SPLITS = ("train", "eval")


class RewardPool:
    """Runs `Environment.reward` in worker processes that can be killed. Implements `protocols.Judge`.

    `weights` gives, per environment, the weight of each named reward part; where it is silent the environment's own
    attribute `weights` speaks, else 1. `keep_env` names secrets that reward code may see after all. `isolated` is for
    rewards that run what a model wrote; where the kernel does not allow it, `start` refuses.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_bytes: int = 2 * 2**30,
        weights: Mapping[str, Mapping[str, float]] | None = None,
        keep_env: Sequence[str] = (),
        isolated: bool = False,
    ) -> None:
        if workers < 1 or timeout_s <= 0 or memory_bytes <= 0:
            raise ConfigError("the reward pool needs at least one worker, a positive timeout and positive memory")
        self._environments = dict(environments)
        self._limits = Limits(workers, timeout_s, memory_bytes, isolated)
        given = weights or {}
        self._weights = {
            name: {**(getattr(env, "weights", None) or {}), **given.get(name, {})}
            for name, env in self._environments.items()
        }
        named = {part for parts in given.values() for part in parts}
        self._parts = PartCheck(named, self._environments)
        self._keep_env = set(keep_env).union(*(getattr(env, "keep_env", ()) for env in self._environments.values()))
        self._pid = 0
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, asyncio.Future[Score]] = {}
        self._unsent = bytearray()
        self._replies = FrameBuffer(MAX_REPLY_BYTES)
        self._last_job = 0
        self._broken: str | None = "the reward pool is not started"
        self._failed: str | None = None  # why there is no server any more, though nobody closed it

    def start(self) -> None:
        """Read every task list and fork the server. Workers inherit both, so any Python object can judge."""
        if self._pid:
            raise RuntimeError("the reward pool is already started")
        if self._limits.isolated:
            check_isolation()
        tasks = {(name, split): env.tasks(split) for name, env in self._environments.items() for split in SPLITS}
        judging = Judging(self._environments, tasks, self._weights)
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # else the child would hold a copy of what is still buffered
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            become_server(theirs, judging, self._limits, self._keep_env, parent)
        theirs.close()
        self._socket = ours
        self._await_ready(ours)
        ours.setblocking(False)
        self._broken = None

    async def score(self, env: str, split: str, index: int, messages: Sequence[Message]) -> Score:
        body = json.dumps({"env": env, "split": split, "index": index, "messages": list(messages)}).encode()
        if len(body) > MAX_JOB_BYTES:
            return Score("error", error=f"a conversation of {len(body):,} bytes; the limit is {MAX_JOB_BYTES:,}")
        if self._failed is not None:
            raise RewardServerError(self._failed)
        if self._broken is None:
            self._attach(asyncio.get_running_loop())
        if self._broken is not None:
            return Score("error", error=self._broken)
        self._last_job += 1
        job, reply = self._last_job, asyncio.get_running_loop().create_future()
        self._waiting[job] = reply
        try:
            self._send(pack(job, JOB, body))
            # Not wait_for: while training holds the loop a reply may sit in the socket past any deadline.
            await wait_awake({reply}, self._deadline_s())
            if not reply.done():
                self._receive()
            if not reply.done():
                self._fail("the reward server is silent")
            score = reply.result()
            if score.status == "ok" and score.reward is not None:
                self._parts.note(env, score.parts)
            return score
        finally:
            self._waiting.pop(job, None)

    async def close(self) -> None:
        """End the server, its workers and everything they started."""
        self._detach()
        self._break("the reward pool is closed")
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while self._pid and not _reaped(self._pid):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        self._pid = 0

    def _deadline_s(self) -> float:
        """All jobs ahead may use their whole time before this one starts."""
        rounds = math.ceil(len(self._waiting) / self._limits.workers)
        return rounds * (self._limits.timeout_s + START_LIMIT_S) + START_LIMIT_S

    def _await_ready(self, channel: socket.socket) -> None:
        channel.settimeout(READY_LIMIT_S)
        try:
            data = channel.recv(1 << 10)
        except TimeoutError:
            data = b""
        if not any(frame.kind == READY for frame in self._replies.feed(data)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
            raise HardwareError("the reward server did not start: this system does not let Shoal fork a process")

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen on this loop; an earlier one (a finished asyncio.run) is forgotten."""
        if self._loop is loop or self._socket is None:
            return
        self._detach()
        self._waiting.clear()
        self._loop = loop
        loop.add_reader(self._socket, self._receive)
        if self._unsent:
            loop.add_writer(self._socket, self._flush)

    def _detach(self) -> None:
        if self._loop is not None and self._socket is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._loop = None

    def _send(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        if self._socket is None or self._loop is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
            self._loop.remove_writer(self._socket)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
        except OSError:
            self._fail_at_its_end()

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._fail_at_its_end()
                return
            for frame in self._replies.feed(data):
                reply = self._waiting.get(frame.job)
                if frame.kind == RESULT and reply is not None and not reply.done():
                    reply.set_result(_to_score(frame.body))

    def _fail_at_its_end(self) -> None:
        """Writing or reading notices it first. A process closes its files a moment before its end can be asked for."""
        deadline = time.monotonic() + END_LIMIT_S
        while (how := confine.end_of(self._pid)) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        self._fail(f"the reward server ended ({how or 'its connection broke'})")

    def _fail(self, reason: str) -> None:
        """Nothing can be scored any more, and another server cannot be forked beside a loaded model."""
        self._detach()
        self._failed = f"{reason}, and with it all rewards; look for what ended it, out of memory perhaps, then resume"
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(RewardServerError(self._failed))

    def _break(self, reason: str) -> None:
        self._detach()
        self._broken = reason
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_result(Score("error", error=reason))


def _to_score(body: bytes) -> Score:
    """A worker's reply; reward code could have written it, so nothing about it is taken on trust."""
    try:
        fields = json.loads(body)
        status, reward, parts = fields["status"], fields.get("reward"), fields.get("parts") or {}
        if status not in ("ok", "error", "timeout"):
            raise ValueError(status)
        return Score(
            status,
            None if reward is None or status != "ok" else checked_number(reward, "the reward"),
            {str(name): checked_number(part, "a part") for name, part in parts.items()},
            None if status == "ok" else str(fields.get("error")),
            float(fields.get("seconds", 0.0)),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Score("error", error="the reward worker sent something that is not a score")


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
