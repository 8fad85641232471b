"""JSON Lines files of a run directory: appending, reading past a torn end, cutting back to a step.

Used by RunDir for metrics, journal and events, and by the report for reading. A line is written in one call and ends in
a newline; what follows the last newline was torn by a crash, is ignored by readers and cut on resume.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import StorageError
from shoal.observability.atomic import fault, open_to_read, storage, write_atomic
from shoal.observability.redact import redact_strings, secret_values


def encode_line(record: Mapping[str, Any], secrets: list[str] | None = None) -> bytes:
    """One record as a line. NaN and infinities become null; secrets are hidden; lone surrogates are escaped.

    Whoever writes many lines at once gives the secrets, since looking them up takes as long as a short line.
    """
    line = _encode(record)
    secrets = secret_values() if secrets is None else secrets
    if any(secret.encode() in line for secret in secrets):
        line = _encode(redact_strings(record, secrets))
    return line + b"\n"


def _encode(record: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(record, enc_hook=_plain)
    except UnicodeEncodeError:  # a lone surrogate in a data set
        return json.dumps(_without_nonfinite(record), separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # a NumPy array or scalar
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole records of a file; a torn or damaged line is passed over, a file that is not there has none."""
    with storage(f"read {path}"):
        try:
            file = open_to_read(path)
        except FileNotFoundError:
            return
        with file:
            for line in file:
                record = decode_line(line)
                if record is not None:
                    yield record


def damaged_lines(path: Path) -> list[int]:
    """Numbers of the lines that readers pass over. A torn end is none: whoever was killed while writing leaves one."""
    try:
        with storage(f"read {path}"), open_to_read(path) as file:
            return [at for at, line in enumerate(file, 1) if line.endswith(b"\n") and decode_line(line) is None]
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise


def decode_line(line: bytes) -> dict[str, Any] | None:
    """A whole record, or None for a torn or damaged line."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # of ten thousand brackets
        return None
    return record if isinstance(record, dict) else None


class LineWriter:
    """Appends records to one file. Safe to call from several threads."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self._durable = durable
        self._guard = threading.Lock()
        self._descriptor = -1
        self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        line = encode_line(record)
        with self._guard, storage(f"append to {self.path}"):
            self._check_still_there()
            self._write(line)
            if self._durable:
                os.fsync(self._descriptor)

    def sync(self) -> None:
        with self._guard, storage(f"sync {self.path}"):
            os.fsync(self._descriptor)

    def cut_to(self, step: int) -> int:
        """Keep the records up to `step`, drop the later and the damaged ones; returns how many were dropped."""
        with self._guard, storage(f"cut {self.path}"):
            with open_to_read(self.path) as file:
                raw = list(file)
            kept = [line for line in raw if (record := decode_line(line)) is not None and record.get("step", 0) <= step]
            if len(kept) != len(raw):
                self._replace(kept)
            return len(raw) - len(kept)

    def amend(self, step: int, more: Mapping[str, Any]) -> None:
        """Put more into the records of one step; the file has them or the ones before, whatever happens."""
        with self._guard, storage(f"amend {self.path}"):
            with open_to_read(self.path) as file:
                raw = list(file)
            found = [(line, decode_line(line)) for line in raw]
            self._replace(
                [
                    encode_line({**record, **more}) if record and record.get("step") == step else line
                    for line, record in found
                ]
            )

    def _replace(self, lines: Sequence[bytes]) -> None:
        write_atomic(self.path, lines)  # may fail, so the old descriptor is given up only afterwards
        stale, self._descriptor = self._descriptor, -1
        os.close(stale)
        self._open()

    def close(self) -> None:
        with self._guard:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _open(self) -> None:
        with storage(f"open {self.path}"):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._cut_torn_end()

    def _cut_torn_end(self) -> None:
        size = os.fstat(self._descriptor).st_size
        end = size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._descriptor, end)

    def _write(self, line: bytes) -> None:
        before = os.fstat(self._descriptor).st_size
        written = 0
        try:
            while written < len(line):  # a nearly full disk takes only a part
                written += os.write(self._descriptor, line[written:])
                fault(f"appended:{self.path.name}")
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise

    def _check_still_there(self) -> None:
        # An open file outlives its name: without this look a removed folder would swallow the run in silence.
        if self._descriptor < 0:
            raise StorageError(f"{self.path} is closed")
        there, mine = self.path.stat(), os.fstat(self._descriptor)
        if (there.st_ino, there.st_dev) != (mine.st_ino, mine.st_dev):
            raise StorageError(f"{self.path} was replaced by someone else while the run was going on")
