"""`RewardPool` sends finished conversations to the reward server and receives the scores. Called by `core.runner`.

`start()` forks the server. Call it before threads, CUDA or a model exist. `score` is called from one event loop at a
time. It raises only if the server itself is lost, never for a failing reward, and it always has a deadline.
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
from dataclasses import replace
from typing import Any

from shoal.core.deadlines import wait_without_suspension
from shoal.core.errors import ConfigError, HardwareError, RewardServerError
from shoal.core.protocols import Environment
from shoal.core.types import Message, Score
from shoal.rewards import sandbox
from shoal.rewards.outcome import INVALID_REPLY, PartCheck, parse_reply
from shoal.rewards.server import START_LIMIT_S, Limits, become_server
from shoal.rewards.worker import JOB, MAX_JOB_BYTES, MAX_REPLY_BYTES, READY, RESULT, FrameBuffer, Judging, pack

READY_LIMIT_S = 60.0
CLOSE_LIMIT_S = 5.0
END_LIMIT_S = 0.5
SPLITS = ("train", "eval")


class RewardPool:
    """Runs `Environment.reward` in worker processes that can be killed. Implements `protocols.Judge`.

    `weights` overrides, per environment, the weights of named reward parts (default: the environment's attribute
    `weights`, else 1). `keep_env` names secrets that reward code may read. `isolated` is for rewards that run code
    written by the model; `start` raises HardwareError if the kernel does not allow it.
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
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._unsent = bytearray()
        self._replies = FrameBuffer(MAX_REPLY_BYTES)
        self._last_job = 0
        self._broken: str | None = "the reward pool is not started"
        self._failed: str | None = None  # why the server was lost

    def start(self) -> None:
        """Read every task list and fork the server. Workers inherit all objects, so nothing needs to be picklable."""
        if self._pid:
            raise RuntimeError("the reward pool is already started")
        if self._limits.isolated:
            sandbox.check_isolation()
        tasks = {(name, split): env.tasks(split) for name, env in self._environments.items() for split in SPLITS}
        judging = Judging(self._environments, tasks, self._weights)
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # else the child inherits a copy of the buffer
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
        job = {"env": env, "split": split, "index": index, "messages": list(messages)}
        return (await self._score(env, job, 1))[0]

    async def score_group(
        self, env: str, split: str, index: int, conversations: Sequence[Sequence[Message]]
    ) -> list[Score]:
        """Score the rollouts of a group in one call of `reward_group`, with one timeout. An error is that of all."""
        group = [list(messages) for messages in conversations]
        return await self._score(env, {"env": env, "split": split, "index": index, "group": group}, len(group))

    async def _score(self, env: str, fields: Mapping[str, Any], count: int) -> list[Score]:
        body = json.dumps(fields).encode()
        if len(body) > MAX_JOB_BYTES:
            return _errors(f"a job of {len(body):,} bytes; the limit is {MAX_JOB_BYTES:,}", count)
        if self._failed is not None:
            raise RewardServerError(self._failed)
        if self._broken is None:
            self._attach(asyncio.get_running_loop())
        if self._broken is not None:
            return _errors(self._broken, count)
        self._last_job += 1
        job, reply = self._last_job, asyncio.get_running_loop().create_future()
        self._waiting[job] = reply
        try:
            self._send(pack(job, JOB, body))
            # Not wait_for: while training blocks the loop, a reply may wait in the socket past the deadline.
            await wait_without_suspension({reply}, self._deadline_s())
            if not reply.done():
                self._receive()
            if not reply.done():
                self._fail("the reward server does not respond")
            scores = _to_scores(reply.result(), count)
            for score in scores:
                if score.status == "ok" and score.reward is not None:
                    self._parts.note(env, score.parts)
            return scores
        finally:
            self._waiting.pop(job, None)

    async def close(self) -> None:
        """End the server, its workers and all processes they started."""
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
        """All queued jobs may use their whole time before this one starts."""
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
            raise HardwareError("the reward server did not start; check that this system allows forking processes")

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use this event loop, and drop an earlier one (of a finished asyncio.run)."""
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
            self._on_server_end()

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_server_end()
                return
            for frame in self._replies.feed(data):
                reply = self._waiting.get(frame.job)
                if frame.kind == RESULT and reply is not None and not reply.done():
                    reply.set_result(frame.body)

    def _on_server_end(self) -> None:
        """Fail with the server's exit status. The socket closes slightly before waitid reports the exit."""
        deadline = time.monotonic() + END_LIMIT_S
        while (how := sandbox.end_of(self._pid)) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        self._fail(f"the reward server ended ({how or 'the connection was closed'})")

    def _fail(self, reason: str) -> None:
        """Fail all waiting jobs. A new server is not possible: fork is unsafe once a model is loaded."""
        self._detach()
        self._failed = f"{reason}; find the cause (possibly out of memory), then resume"
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(RewardServerError(self._failed))

    def _break(self, reason: str) -> None:
        self._detach()
        self._broken = reason
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_result(json.dumps({"status": "error", "error": reason}).encode())


def _to_scores(body: bytes, count: int) -> list[Score]:
    try:
        scores = parse_reply(body)
    except ValueError:
        return _errors(INVALID_REPLY, count)
    if len(scores) == 1 and scores[0].status != "ok":
        return [replace(scores[0], seconds=scores[0].seconds / count) for _ in range(count)]
    return scores if len(scores) == count else _errors(INVALID_REPLY, count)


def _errors(error: str, count: int) -> list[Score]:
    return [Score("error", error=error) for _ in range(count)]


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
