"""Numbered calls from the orchestrator to the trainer and their answers, as they travel: msgpack, never pickle.

A call names the session (an incarnation of the caller) and whom it is for, so nothing left from a killed process is
taken for something new. Large payloads lie in files; a channel sends the file's name or its content.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal.errors import (
    EXIT_BUG,
    EXIT_STORAGE,
    EXIT_USAGE,
    ConfigError,
    ShoalError,
    StoppedByPolicy,
    StorageError,
)

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a name that stays in its folder


class Call(msgspec.Struct, array_like=True):
    number: int
    session: str  # the caller's incarnation
    to: str  # the answerer's incarnation
    method: str
    head: dict[str, Any] = {}
    bulk: bytes | None = None  # the payload itself,
    file: str | None = None  # or the name of its file beside the call


class Answer(msgspec.Struct, array_like=True):
    number: int
    value: dict[str, Any] = {}
    error: str | None = None
    code: int = 0


class Caller(Protocol):
    """The asking end of a channel."""

    async def ask(self, call: Call, bulk: Path | None, watch: Callable[[], None]) -> Answer:
        """Send the call and wait for its answer. `watch` is called while waiting and raises to give up."""
        ...

    async def close(self) -> None: ...


class Answerer(Protocol):
    """The answering end."""

    address: str  # where callers find it; empty where they need no address

    async def next(self) -> Call | None:
        """The next call meant for this process, or None if none came for a moment."""
        ...

    async def answer(self, call: Call, answer: Answer) -> None: ...

    async def close(self) -> None: ...


def failed(number: int, error: BaseException) -> Answer:
    code = error.exit_code if isinstance(error, ShoalError) else EXIT_BUG
    said = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
    return Answer(number, error=said, code=code)


def raise_failed(answer: Answer, who: str) -> None:
    """What failed there fails here, in the same class of error."""
    if answer.error is None:
        return
    said = f"{who}: {answer.error}"
    if answer.code == EXIT_USAGE:
        raise ConfigError(said)
    if answer.code == EXIT_STORAGE:
        raise StorageError(said)
    raise StoppedByPolicy(said)


def read_bulk(call: Call, folder: Path | None) -> bytes:
    """The payload of a call, wherever it lies."""
    if call.bulk is not None:
        return call.bulk
    if call.file is None or folder is None or not all(map(_PLAIN.fullmatch, (call.session, call.file))):
        raise ConfigError(f"call {call.number} ({call.method}) comes without its payload")
    try:
        return (folder / call.session / call.file).read_bytes()
    except OSError as error:
        raise StorageError(f"call {call.number} ({call.method}): {call.file} cannot be read: {error}") from error
