"""Numbered calls from the orchestrator to the trainer and their answers, as they travel: msgpack, never pickle.

A call names the session (an incarnation of the caller) and whom it is for, so nothing left from a killed process is
taken for something new. Large payloads lie in files; a channel sends the file's name or its content.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
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
from shoal.observability.atomic import storage_error, write_atomic

_MAY_PASS = (errno.ENOENT, errno.ESTALE)  # what a file system says of a file that another machine wrote just now
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a name that stays in its folder


class Announced(msgspec.Struct, array_like=True):
    """A payload as its caller wrote it: its name beside the call, and what will have come when it is whole."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Bulk:
    """A payload in its file, and what was written there."""

    path: Path
    announced: Announced


class NotYet(StorageError):
    """A payload that is not there, or not all of it: a network's file system may show it later."""


class Call(msgspec.Struct, array_like=True):
    number: int
    session: str  # the caller's incarnation
    to: str  # the answerer's incarnation
    method: str
    head: dict[str, Any] = {}
    bulk: bytes | None = None  # the payload itself, where the channel carries it
    file: Announced | None = None


class Answer(msgspec.Struct, array_like=True):
    number: int
    value: dict[str, Any] = {}
    error: str | None = None
    code: int = 0


class Caller(Protocol):
    """The asking end of a channel."""

    async def ask(self, call: Call, bulk: Bulk | None, watch: Callable[[], None]) -> Answer:
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


def write_bulk(path: Path, content: bytes) -> Bulk:
    """Whole or not at all. What it is remembered by is taken from the content, not from the disk."""
    write_atomic(path, content, durable=False)
    return Bulk(path, Announced(path.name, len(content), _digest(content)))


def read_bulk(call: Call, folder: Path | None) -> bytes:
    """The payload of a call, wherever it lies. NotYet if it may still come; what is damaged stays so."""
    file = call.file
    if file is None or not all(map(_PLAIN.fullmatch, (call.session, file.name))):
        raise ConfigError(f"call {call.number} ({call.method}) comes without its payload")
    content = call.bulk if call.bulk is not None else _read(call, folder, file)
    if len(content) == file.size_bytes and _digest(content) == file.digest:
        return content
    what = f"{file.name}, which call {call.number} ({call.method}) names,"
    if len(content) < file.size_bytes and call.bulk is None:
        raise NotYet(f"{what} has {len(content)} of {file.size_bytes} bytes")
    raise StorageError(f"{what} is damaged: its {len(content)} bytes are not those that were written; check the disk")


def _read(call: Call, folder: Path | None, file: Announced) -> bytes:
    if folder is None:
        raise ConfigError(f"call {call.number} ({call.method}) comes without its payload")
    try:
        return (folder / call.session / file.name).read_bytes()
    except OSError as error:
        what = f"{file.name}, which call {call.number} ({call.method}) names"
        if error.errno in _MAY_PASS:
            raise NotYet(f"{what}, is not there") from error
        raise storage_error(f"read {what}", error) from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
