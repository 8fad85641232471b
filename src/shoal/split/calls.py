"""Numbered calls from the orchestrator to the trainer: messages, payloads, the channels (a shared folder or TCP).

A call names its caller and its receiver by incarnation, so messages of a killed process are ignored. All data is
msgpack, never pickle. Over TCP the trainer listens, and the orchestrator connects and sends the token of the run, which
is in the shared folder, readable only by its owner. A frame is a length and msgpack; an invalid one closes the
connection. An answered call that is sent again gets the same answer and is not executed again.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np

from shoal.core.errors import (
    EXIT_BUG,
    EXIT_STORAGE,
    EXIT_USAGE,
    ConfigError,
    EngineError,
    ShoalError,
    StoppedByPolicy,
    StorageError,
)
from shoal.core.learn import StepResult
from shoal.core.metrics import Tally
from shoal.core.types import Rollout, RolloutGroup
from shoal.rollout.remote.client import retry
from shoal.runs.files import open_to_read, remove_quietly, storage, storage_error, write_atomic
from shoal.runs.secrets import CALLS, write_token

_MAY_PASS = (errno.ENOENT, errno.ESTALE)  # errors of a network file system for a file that another machine just wrote
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a file name without path parts


class PayloadInfo(msgspec.Struct, array_like=True):
    """Name, size and digest of a payload, to detect one that is incomplete or damaged."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Payload:
    """A payload file and its info."""

    path: Path
    announced: PayloadInfo


class PayloadNotReady(StorageError):
    """A payload is missing or incomplete. A network file system may show it later."""


class Call(msgspec.Struct, array_like=True):
    number: int
    session: str  # the caller's incarnation
    to: str  # the answerer's incarnation
    method: str
    head: dict[str, Any] = {}
    bulk: bytes | None = None  # the payload itself, if the channel carries it
    file: PayloadInfo | None = None


class Answer(msgspec.Struct, array_like=True):
    number: int
    value: dict[str, Any] = {}
    error: str | None = None
    code: int = 0


class Caller(Protocol):
    """The orchestrator's end of a channel."""

    async def ask(self, call: Call, bulk: Payload | None, watch: Callable[[], None]) -> Answer:
        """Send the call and wait for its answer. `watch` is called while waiting, and raises to cancel."""
        ...

    async def close(self) -> None: ...


class Answerer(Protocol):
    """The trainer's end of a channel."""

    address: str  # where callers connect; empty if no address is needed

    async def next(self) -> Call | None:
        """The next call for this process, or None if none arrived within ROUND_S."""
        ...

    async def answer(self, call: Call, answer: Answer) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class ErrorRecord:
    """An error in the form in which it is sent to another process."""

    message: str
    exit_code: int

    @classmethod
    def of(cls, error: Exception) -> ErrorRecord:
        if isinstance(error, ShoalError):
            return cls(str(error), error.exit_code)
        return cls(f"{type(error).__name__}: {error}", EXIT_BUG)

    def raise_here(self, who: str) -> NoReturn:
        """Raise the same kind of error in this process; `who` names the process that failed."""
        message = f"{who}: {self.message}"
        if self.exit_code == EXIT_USAGE:
            raise ConfigError(message)
        if self.exit_code == EXIT_STORAGE:
            raise StorageError(message)
        raise StoppedByPolicy(message)


def failed(number: int, error: Exception) -> Answer:
    record = ErrorRecord.of(error)
    return Answer(number, error=record.message, code=record.exit_code)


def raise_failed(answer: Answer, who: str) -> None:
    """Raise the error of a failed call as the same error class."""
    if answer.error is not None:
        ErrorRecord(answer.error, answer.code).raise_here(who)


def write_bulk(path: Path, content: bytes) -> Payload:
    """Write atomically. The digest is computed from the content, not read back."""
    write_atomic(path, content, durable=False)
    return Payload(path, PayloadInfo(path.name, len(content), _digest(content)))


def read_bulk(call: Call, folder: Path | None) -> bytes:
    """The payload of a call. Raises PayloadNotReady if it may still arrive, StorageError if it is damaged."""
    file = call.file
    if file is None or not all(map(_PLAIN.fullmatch, (call.session, file.name))):
        raise ConfigError(f"call {call.number} ({call.method}) comes without its payload")
    content = call.bulk if call.bulk is not None else _read(call, folder, file)
    if len(content) == file.size_bytes and _digest(content) == file.digest:
        return content
    what = f"{file.name}, the payload of call {call.number} ({call.method}),"
    if len(content) < file.size_bytes and call.bulk is None:
        raise PayloadNotReady(f"{what} has {len(content)} of {file.size_bytes} bytes")
    raise StorageError(f"{what} is damaged: its {len(content)} bytes are not those that were written; check the disk")


def _read(call: Call, folder: Path | None, file: PayloadInfo) -> bytes:
    if folder is None:
        raise ConfigError(f"call {call.number} ({call.method}) comes without its payload")
    try:
        return (folder / call.session / file.name).read_bytes()
    except OSError as error:
        what = f"{file.name}, the payload of call {call.number} ({call.method})"
        if error.errno in _MAY_PASS:
            raise PayloadNotReady(f"{what}, is not there") from error
        raise storage_error(f"read {what}", error) from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


FOLDER = "samples"
PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05
ROUND_S = 0.25  # how long `next` polls before it returns None


class FolderCaller:
    """Calls as files samples/<session>/call_000012.msgpack, with the answers next to them. All writes are atomic. The
    caller removes answered calls, and its folder when it closes."""

    def __init__(self, output_dir: Path | str, session: str) -> None:
        self.folder = Path(output_dir) / FOLDER / session
        with storage(f"create {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.parent.iterdir():
            if old.name != session:  # the run is locked, so its writer is gone
                remove_quietly(old)

    async def ask(self, call: Call, bulk: Payload | None, watch: Callable[[], None]) -> Answer:
        call.file = bulk.announced if bulk is not None else None
        request, answered = _paths(self.folder, call.number)
        write_atomic(request, msgspec.msgpack.encode(call), durable=False)
        pause = PAUSE_S
        try:
            while True:
                if answered.exists():
                    with storage(f"read {answered}"), open_to_read(answered) as file:
                        return msgspec.msgpack.decode(file.read(), type=Answer)
                watch()
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE_S, pause * 1.2)
        finally:
            remove_quietly(request)
            remove_quietly(answered)

    async def close(self) -> None:
        remove_quietly(self.folder)


class FolderAnswerer:
    """`session` returns the incarnation of the caller, which changes when it is restarted."""

    address = ""

    def __init__(self, output_dir: Path | str, incarnation: str, session: Callable[[], str | None]) -> None:
        self.folder = Path(output_dir) / FOLDER
        self._incarnation = incarnation
        self._session = session
        self._done: tuple[str, int] = ("", 0)

    async def next(self) -> Call | None:
        pause, waited = PAUSE_S, 0.0
        while waited < ROUND_S:
            call = self._find(self._session())
            if call is not None:
                return call
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(LONGEST_PAUSE_S, pause * 1.2)
        return None

    def _find(self, session: str | None) -> Call | None:
        if session is None:
            return None
        done = self._done[1] if self._done[0] == session else 0
        try:
            names = sorted(path for path in (self.folder / session).iterdir() if path.name.startswith("call_"))
        except OSError:
            return None
        for path in names:
            if int(path.stem.removeprefix("call_")) <= done:
                continue
            try:
                call = msgspec.msgpack.decode(path.read_bytes(), type=Call)
            except OSError:
                continue  # removed by the caller meanwhile
            except msgspec.MsgspecError as error:
                raise EngineError(f"{path} is not a call of this Shoal: {error}") from error
            if call.to == self._incarnation and call.session == session:  # its answer is written under that name
                return call
        return None

    async def answer(self, call: Call, answer: Answer) -> None:
        self._done = (call.session, call.number)
        folder = self.folder / call.session
        if folder.is_dir():  # else the caller is gone, and its successor sends the call again
            write_atomic(_paths(folder, call.number)[1], msgspec.msgpack.encode(answer), durable=False)

    async def close(self) -> None:
        return


def _paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"call_{number:06d}.msgpack", folder / f"answer_{number:06d}.msgpack"


def pack_groups(groups: Sequence[RolloutGroup]) -> bytes:
    """Groups without texts: training needs ids, log-probs and rewards, which are packed bit-exactly."""
    return msgspec.msgpack.encode([_without_texts(group) for group in groups])


def unpack_groups(data: bytes) -> list[RolloutGroup]:
    try:
        return msgspec.msgpack.decode(data, type=list[RolloutGroup])
    except msgspec.MsgspecError as error:
        raise EngineError(f"the rollouts of a step cannot be read: {error}") from error


def _without_texts(group: RolloutGroup) -> RolloutGroup:
    def strip(rollout: Rollout) -> Rollout:
        turns = [replace(turn, completion=replace(turn.completion, text="")) for turn in rollout.turns]
        return replace(rollout, prompt=replace(rollout.prompt, messages=[]), messages=[], error=None, turns=turns)

    prompt = replace(group.prompt, messages=[])
    return replace(group, prompt=prompt, rollouts=[strip(rollout) for rollout in group.rollouts])


def pack_learned(learned: StepResult, tally: Tally, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    logprobs = {name: [str(values.dtype), values.tobytes()] for name, values in learned.policy_logprobs.items()}
    return {
        "trained_rollouts": learned.trained_rollouts,
        "trained_tokens": learned.trained_tokens,
        "sample_tokens": learned.sample_tokens,
        "skipped": learned.skipped,
        "moved": learned.moved,
        "policy_logprobs": logprobs,
        "tally": tally.state(),
        "rollouts": [[[r.reward, r.advantage, r.token_advantages] for r in group.rollouts] for group in groups],
    }


def unpack_learned(value: Mapping[str, Any], tally: Tally, groups: Sequence[RolloutGroup]) -> StepResult:
    """The result of a step. Writes rewards and advantages into the groups, as a learner in this process would."""
    tally.take(value["tally"])
    for group, rollouts in zip(groups, value["rollouts"], strict=True):
        for rollout, (reward, advantage, per_token) in zip(group.rollouts, rollouts, strict=True):
            rollout.reward, rollout.advantage, rollout.token_advantages = reward, advantage, per_token
    logprobs = {name: np.frombuffer(data, dtype=dtype) for name, (dtype, data) in value["policy_logprobs"].items()}
    return StepResult(
        list(value["trained_rollouts"]),
        int(value["trained_tokens"]),
        int(value["sample_tokens"]),
        bool(value["skipped"]),
        bool(value["moved"]),
        logprobs,
    )


MAX_FRAME_BYTES = 4 << 30
MAX_HELLO_BYTES = 1 << 10
HELLO_S = 10.0
WATCH_S = 0.05
LENGTH = struct.Struct("!Q")
Address = Callable[[], str | None]


class TcpCaller:
    """`address` returns where the trainer listens, which changes when it is restarted."""

    def __init__(self, folder: Path, address: Address) -> None:
        self._folder = folder
        self._address = address
        self._connection: tuple[str, asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, call: Call, bulk: Payload | None, watch: Callable[[], None]) -> Answer:
        if bulk is not None:
            with storage(f"read {bulk.path}"):
                call.bulk, call.file = bulk.path.read_bytes(), bulk.announced
        frame = msgspec.msgpack.encode(call)
        return await retry((OSError, EOFError))(self._watched_attempt, frame, call.number, watch)

    async def _watched_attempt(self, frame: bytes, number: int, watch: Callable[[], None]) -> Answer:
        attempt = asyncio.ensure_future(self._attempt(frame, number))
        try:
            while not attempt.done():
                watch()
                await asyncio.wait({attempt}, timeout=WATCH_S)
            return attempt.result()
        except (OSError, EOFError):
            await self._drop()
            watch()
            raise
        finally:
            if not attempt.done():
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
                await self._drop()  # part of a frame may have been sent

    async def _attempt(self, frame: bytes, number: int) -> Answer:
        reader, writer = await self._connected()
        await write_frame(writer, frame)
        while True:
            answer = msgspec.msgpack.decode(await read_frame(reader), type=Answer)
            if answer.number == number:
                return answer

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._address()
        if address is None:
            raise ConnectionError("grpo-train has not published its address")
        if self._connection is not None and self._connection[0] == address:
            return self._connection[1], self._connection[2]
        await self._drop()
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), HELLO_S)
        await write_frame(writer, (self._folder / CALLS).read_bytes())
        self._connection = (address, reader, writer)
        return reader, writer

    async def _drop(self) -> None:
        if self._connection is not None:
            _, _, writer = self._connection
            self._connection = None
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def close(self) -> None:
        await self._drop()


class TcpAnswerer:
    """Created by `listen`. The newest connection with a valid token is the caller."""

    def __init__(self, incarnation: str, token: str) -> None:
        self._incarnation = incarnation
        self._token = token
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._last: tuple[str, int, bytes] | None = None  # session, number, answer
        self._server: asyncio.Server | None = None
        self.address = ""

    @classmethod
    async def listen(cls, folder: Path, incarnation: str, host: str, port: int) -> TcpAnswerer:
        answerer = cls(incarnation, write_token(folder / CALLS))
        try:
            answerer._server = await asyncio.start_server(answerer._accept, host, port)
        except OSError as error:
            raise ConfigError(
                f"train.rollout_transport: cannot listen on {host}:{port}: {_why(error)}; choose another "
                "train.rollout_transport.port"
            ) from error
        bound = answerer._server.sockets[0].getsockname()[1]
        answerer.address = f"{host}:{bound}"
        return answerer

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            token = await asyncio.wait_for(read_frame(reader, MAX_HELLO_BYTES), HELLO_S)
            if not hmac.compare_digest(token, self._token.encode()):
                return
            if self._writer is not None:
                self._writer.transport.abort()  # a pending write may wait for a reader that is gone
            self._writer = writer
            while not self._calls.empty():  # the caller sends unanswered calls again
                self._calls.get_nowait()
            while True:
                call = msgspec.msgpack.decode(await read_frame(reader), type=Call)
                if self._writer is not writer:
                    return  # a newer connection replaced this one
                if call.to == self._incarnation:
                    self._calls.put_nowait(call)
        except (OSError, EOFError, TimeoutError, EngineError, msgspec.MsgspecError):
            return  # a caller connects again
        finally:
            writer.close()

    async def next(self) -> Call | None:
        while True:
            try:
                call = await asyncio.wait_for(self._calls.get(), ROUND_S)
            except TimeoutError:
                return None
            if self._last is None or self._last[0] != call.session or self._last[1] < call.number:
                return call
            if self._last[1] == call.number:  # sent again over another connection while it was computed
                await self._send(self._last[2])

    async def answer(self, call: Call, answer: Answer) -> None:
        encoded = msgspec.msgpack.encode(answer)
        self._last = (call.session, call.number, encoded)
        await self._send(encoded)

    async def _send(self, encoded: bytes) -> None:
        if self._writer is not None:
            with suppress(OSError):  # the caller connects and sends the call again
                await write_frame(self._writer, encoded)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()


async def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(LENGTH.pack(len(data)))
    writer.write(data)
    await writer.drain()


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > limit:
        raise EngineError(f"a frame of {length} bytes is more than the {limit} allowed")
    return await reader.readexactly(length)


def _why(error: OSError) -> str:
    """The error of the system without the address that asyncio adds."""
    return os.strerror(error.errno) if error.errno else str(error)
