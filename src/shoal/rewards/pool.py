"""`RewardPool` sends finished conversations to the reward server and receives the scores. Called by `core.runner`.

`start()` forks the keeper, which forks the server. Call it before threads, CUDA or a model exist. `score` is called
from one event loop at a time. It raises only if no server can be had any more, never for a failing reward. A server
that ends or does not respond is replaced: the jobs its workers had are errors, the others are sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shoal.core.deadlines import wait_without_suspension
from shoal.core.errors import ConfigError, HardwareError, RewardServerError
from shoal.core.protocols import Environment
from shoal.core.types import Message, Score
from shoal.rewards import isolation, sandbox
from shoal.rewards.environment_process import CloseReport, EnvironmentProcess, Phase, Places
from shoal.rewards.keeper import READY, RESTART, become_keeper
from shoal.rewards.outcome import INVALID_REPLY, PartCheck, parse_reply
from shoal.rewards.server import START_LIMIT_S, Limits
from shoal.rewards.worker import (
    CLOSE,
    JOB,
    LAST_RESULT,
    MAX_JOB_BYTES,
    MAX_REPLY_BYTES,
    NO_JOB,
    PING,
    RESULT,
    STARTED,
    Frame,
    FrameBuffer,
    Judging,
    pack,
)

READY_LIMIT_S = 60.0
PREPARE_LIMIT_S = 600.0  # until the first server answers: the environments may load much
PING_S = 1.0
PING_LIMIT_S = 10.0  # then the server is killed and replaced, however many jobs wait
KEEPER_LIMIT_S = 10.0
MAX_RESTARTS = 3  # without a result in between
CLOSE_LIMIT_S = 5.0
END_LIMIT_S = 0.5
SPLITS = ("train", "eval")


@dataclass(slots=True)
class Job:
    frame: bytes
    reply: asyncio.Future[bytes]
    started: bool = False
    closes: bool = False  # waits for the end of an environment; the result of its last call may still arrive


class RewardPool:
    """Runs `Environment.reward` in worker processes that can be killed. Implements `protocols.Judge`.

    A stateful environment has a worker of its own while `environment` is open: at most `processes` at a time, with
    `call_timeout_s` for each call.

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
        processes: int = 64,
        call_timeout_s: float = 60.0,
    ) -> None:
        if min(workers, processes) < 1 or min(timeout_s, call_timeout_s) <= 0 or memory_bytes <= 0:
            raise ConfigError("the reward pool needs at least one worker, a positive timeout and positive memory")
        self.notices: list[str] = []  # what the console should say about these rewards
        self._environments = dict(environments)
        self._limits = Limits(workers, timeout_s, memory_bytes, isolated, call_timeout_s)
        self._places = Places(processes)
        self._report_close = CloseReport()
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
        self._link: socket.socket | None = None  # to the keeper
        self._waiting: dict[bytes, Job] = {}
        self._unsent = bytearray()
        self._replies = FrameBuffer(MAX_REPLY_BYTES)
        self._watch: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # the server answered a ping, or was lost
        self._lost: str | None = None  # why the present server must be replaced
        self._proven = False  # a server has answered a ping, so the environments are prepared
        self._quiet_s = 0.0  # since the last result, while jobs wait
        self._restarts = 0
        self._broken: str | None = "the reward pool is not started"
        self._failed: str | None = None  # why the server was lost

    def start(self) -> None:
        """Read every task list and fork the server. Workers inherit all objects, so nothing needs to be picklable."""
        if self._pid:
            raise RuntimeError("the reward pool is already started")
        if self._limits.isolated:
            isolation.check_isolation()
        tasks = {(name, split): env.tasks(split) for name, env in self._environments.items() for split in SPLITS}
        judging = Judging(self._environments, tasks, self._weights)
        ours, theirs = socket.socketpair()
        link, keepers_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # else the child inherits a copy of the buffer
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            link.close()
            become_keeper(keepers_link, theirs, judging, self._limits, self._keep_env, parent)
        theirs.close()
        keepers_link.close()
        self._socket, self._link = ours, link
        self._await_ready(link)
        ours.setblocking(False)
        link.setblocking(False)
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
        return self.noted(env, _to_scores(await self._request(_new_name(), JOB, fields), count))

    def noted(self, env: str, scores: list[Score]) -> list[Score]:
        """Fill in the weights of named parts, and note their names."""
        for score in scores:
            score.part_weights = {name: w for name, w in self._weights.get(env, {}).items() if name in score.parts}
            if score.status == "ok" and score.reward is not None:
                self._parts.note(env, score.parts)
        return scores

    @contextlib.asynccontextmanager
    async def environment(
        self, env: str, split: str, index: int, phase: Phase = nullcontext
    ) -> AsyncIterator[EnvironmentProcess]:
        """A process with the stateful environment of a task. The environment is closed however the block ends.

        Waits while all places are taken. A place is free again once its process has ended. The caller counts the
        named parts of its reward with `noted`.
        """
        release, name = await self._places.take(phase), _new_name()
        process = EnvironmentProcess(partial(self._request, name), phase)
        try:
            await process.open({"env": env, "split": split, "index": index})
            yield process
        finally:
            self._close_environment(env, name, release)

    def _close_environment(self, env: str, name: bytes, release: Callable[[], None]) -> None:
        """Nobody waits until it is closed, except for its place."""

        def closed(reply: asyncio.Future[bytes]) -> None:
            self._waiting.pop(name, None)
            release()
            if not reply.cancelled() and reply.exception() is None and self._broken is None:
                self._report_close(env, reply.result())

        if self._failed is None and self._broken is None:
            self._post(name, CLOSE, b"{}").reply.add_done_callback(closed)
        else:
            release()

    async def _request(self, name: bytes, kind: int, fields: Mapping[str, Any]) -> bytes:
        """Send a job and return its outcome: JSON with a status."""
        body = json.dumps(fields).encode()
        if len(body) > MAX_JOB_BYTES:
            return _error(f"a job of {len(body):,} bytes; the limit is {MAX_JOB_BYTES:,}")
        if self._failed is not None:
            raise RewardServerError(self._failed)
        if self._broken is None:
            self._attach(asyncio.get_running_loop())
        if self._broken is not None:
            return _error(self._broken)
        job = self._post(name, kind, body)
        try:
            return await job.reply
        finally:
            if self._waiting.get(name) is job:
                del self._waiting[name]

    def _post(self, name: bytes, kind: int, body: bytes) -> Job:
        job = self._waiting[name] = Job(pack(name, kind, body), asyncio.get_running_loop().create_future())
        job.closes = kind == CLOSE
        self._send(job.frame)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_server())
            self._watch.add_done_callback(self._on_watch_end)
        return job

    async def close(self) -> None:
        """End the server, its workers and all processes they started."""
        self._detach()
        self._break("the reward pool is closed")
        if self._watch is not None and not self._watch.get_loop().is_closed():
            self._watch.cancel()
        for connection in (self._socket, self._link):
            if connection is not None:
                connection.close()
        self._socket = self._link = None
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while self._pid and not _reaped(self._pid):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            os.kill(self._pid, signal.SIGCONT)
            await asyncio.sleep(0.01)
        self._pid = 0

    async def _watch_server(self) -> None:
        """While jobs wait: ping the server, and replace it if it is lost. No limit here grows with the batch."""
        self._quiet_s, self._news = 0.0, asyncio.Event()
        while self._waiting and self._broken is None and self._failed is None:
            if self._lost is None:
                await self._ping()
            if self._lost is not None:
                await self._restart(self._lost)

    def _on_watch_end(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._fail(f"the reward server cannot be watched: {error!r}")

    async def _ping(self) -> None:
        self._news.clear()
        self._send(pack(NO_JOB, PING))
        began = time.monotonic()
        # Not wait_for: while training blocks the loop, a reply may wait in the socket past the deadline.
        await self._wait_for_result(PING_LIMIT_S if self._proven else PREPARE_LIMIT_S)
        if not self._news.is_set():
            self._receive()
        if not self._news.is_set():
            self._lost = "the reward server does not respond"
        elif self._lost is None:
            self._news.clear()
            await self._wait_for_result(PING_S)
            self._quiet_s += min(time.monotonic() - began, 2 * PING_S) if self._proven else 0.0
            if self._quiet_s > max(self._limits.timeout_s, self._limits.call_timeout_s) + 2 * START_LIMIT_S:
                self._lost = "the reward server returns no results"

    async def _wait_for_result(self, limit_s: float) -> None:
        waiting = asyncio.ensure_future(self._news.wait())
        try:
            await wait_without_suspension({waiting}, limit_s)
        finally:
            waiting.cancel()

    async def _restart(self, reason: str) -> None:
        """Have the keeper kill the server and fork another one. Only jobs that a worker had are errors."""
        self._restarts += 1
        self._close_server()
        server = await self._new_server() if self._restarts <= MAX_RESTARTS else None
        if server is None:
            self._fail(reason)
            return
        self._socket, self._lost, self._quiet_s = server, None, 0.0
        for job in self._waiting.values():
            if job.started and not job.reply.done():
                job.reply.set_result(_error(f"{reason}; it was replaced"))
        self._attach(asyncio.get_running_loop())
        self._unsent.clear()  # jobs that came meanwhile wait as well
        self._send(b"".join(job.frame for job in self._waiting.values() if not job.reply.done()))

    async def _new_server(self) -> socket.socket | None:
        """None if the keeper does not answer. Reward code may have stopped it, so it is woken up."""
        deadline = time.monotonic() + KEEPER_LIMIT_S
        asked = False
        while self._link is not None and sandbox.end_of(self._pid) is None and time.monotonic() < deadline:
            os.kill(self._pid, signal.SIGCONT)
            try:
                asked = asked or self._link.send(RESTART) > 0
                _, (descriptor,), _, _ = socket.recv_fds(self._link, 64, 1)
            except BlockingIOError:
                await asyncio.sleep(0.02)
            except (OSError, ValueError):
                return None
            else:
                server = socket.socket(fileno=descriptor)
                server.setblocking(False)
                return server
        return None

    def _close_server(self) -> None:
        self._detach()
        self._unsent.clear()
        self._replies = FrameBuffer(MAX_REPLY_BYTES)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _await_ready(self, link: socket.socket) -> None:
        link.settimeout(READY_LIMIT_S)
        try:
            data = link.recv(64)
        except OSError:
            data = b""
        if data != READY:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
            raise HardwareError("the reward server did not start; check that this system allows forking processes")

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use this event loop, and drop an earlier one (of a finished asyncio.run)."""
        if self._loop is loop or self._socket is None:
            return
        if self._loop is not None:
            self._waiting.clear()
        self._detach()
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
                if frame.kind == PING:
                    self._proven = True
                    self._news.set()
                elif (job := self._waiting.get(frame.job)) is not None and not job.reply.done():
                    self._on_frame(job, frame)

    def _on_frame(self, job: Job, frame: Frame) -> None:
        self._quiet_s = 0.0
        if frame.kind == STARTED:
            job.started = True
        elif frame.kind == LAST_RESULT or (frame.kind == RESULT and not job.closes):
            self._restarts = 0
            job.reply.set_result(frame.body)

    def _on_server_end(self) -> None:
        self._detach()
        self._lost = self._lost or "the reward server ended"
        self._news.set()

    def _fail(self, reason: str) -> None:
        """Fail all waiting jobs, with the exit status if the keeper ended. No other keeper can be forked by now."""
        self._detach()
        deadline = time.monotonic() + END_LIMIT_S  # its connections close slightly before waitid reports the exit
        while (how := sandbox.end_of(self._pid)) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        reason = f"the reward server ended ({how})" if how else reason
        self._failed = f"{reason}; find the cause (possibly out of memory), then resume"
        for job in self._waiting.values():
            if not job.reply.done():
                job.reply.set_exception(RewardServerError(self._failed))

    def _break(self, reason: str) -> None:
        self._detach()
        self._broken = reason
        for job in list(self._waiting.values()):
            if not job.reply.done() and not job.reply.get_loop().is_closed():
                job.reply.set_result(_error(reason))


def _new_name() -> bytes:
    return os.urandom(len(NO_JOB))


def _error(error: str) -> bytes:
    return json.dumps({"status": "error", "error": error}).encode()


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
