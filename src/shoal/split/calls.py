"""Numbered calls from the orchestrator to the trainer: messages, payloads, and the channel over a shared folder.

A call names its caller and its receiver by incarnation, so files of a killed process are ignored. All data is msgpack,
never pickle. tcp_calls.py is the other channel.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
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
from shoal.core.types import Rollout, RolloutGroup, Turn
from shoal.runs.files import open_to_read, remove_quietly, storage, storage_error, write_atomic

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
    prompt = replace(group.prompt, messages=[])
    return replace(group, prompt=prompt, rollouts=[_rollout_without_texts(rollout) for rollout in group.rollouts])


def _rollout_without_texts(rollout: Rollout) -> Rollout:
    prompt = replace(rollout.prompt, messages=[])
    return replace(
        rollout, prompt=prompt, messages=[], error=None, turns=[_turn_without_texts(t) for t in rollout.turns]
    )


def _turn_without_texts(turn: Turn) -> Turn:
    return replace(turn, completion=replace(turn.completion, text=""))


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
