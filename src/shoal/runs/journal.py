"""JSON Lines files of a run directory: append, read, cut back to a step.

RunDir writes metrics, journal and events with it; the report reads with it. Each line is written in one call and ends
with a newline. Data after the last newline is a partial write of a crash: readers ignore it, a resume removes it.
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

from shoal.core.errors import StorageError
from shoal.runs.files import fault, open_to_read, storage, write_atomic
from shoal.runs.secrets import redact_strings, secret_values


def encode_line(record: Mapping[str, Any], secrets: list[str] | None = None) -> bytes:
    """One record as a line. NaN and infinities become null, secrets are hidden, lone surrogates are escaped.

    Pass `secrets` when writing many lines: collecting them takes as long as encoding a short line.
    """
    line = _encode(record)
    secrets = secret_values() if secrets is None else secrets
    if any(secret.encode() in line for secret in secrets):
        line = _encode(redact_strings(record, secrets))
    return line + b"\n"


def _encode(record: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(record, enc_hook=_plain)
    except UnicodeEncodeError:  # a lone surrogate in the data
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
    """The complete records of a file. Partial and damaged lines are skipped; a missing file has no records."""
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
    """Numbers of the lines that readers skip, except a partial last line, which a killed process may leave."""
    try:
        with storage(f"read {path}"), open_to_read(path) as file:
            return [at for at, line in enumerate(file, 1) if line.endswith(b"\n") and decode_line(line) is None]
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise


def decode_line(line: bytes) -> dict[str, Any] | None:
    """A complete record, or None for a partial or damaged line."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
        return None
    return record if isinstance(record, dict) else None


def is_up_to(record: dict[str, Any] | None, step: int) -> bool:
    of = record.get("step", 0) if record is not None else None
    return isinstance(of, int) and of <= step


class LineWriter:
    """Appends records to one file. Thread-safe."""

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
        """Keep the records up to `step`; drop later and damaged ones. Returns the number of dropped lines."""
        with self._guard, storage(f"cut {self.path}"):
            with open_to_read(self.path) as file:
                raw = list(file)
            kept = [line for line in raw if is_up_to(decode_line(line), step)]
            if len(kept) != len(raw):
                self._replace(kept)
            return len(raw) - len(kept)

    def replace(self, lines: Sequence[bytes]) -> None:
        """Replace the whole content, atomically."""
        with self._guard, storage(f"restore {self.path}"):
            self._replace(lines)

    def amend(self, step: int, more: Mapping[str, Any]) -> None:
        """Add fields to the records of one step, atomically."""
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
        write_atomic(self.path, lines)  # may fail, so the old descriptor is closed afterwards
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
            self._drop_partial_line()

    def _drop_partial_line(self) -> None:
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
            while written < len(line):  # a nearly full disk accepts only a part
                written += os.write(self._descriptor, line[written:])
                fault(f"appended:{self.path.name}")
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise

    def _check_still_there(self) -> None:
        # An open file outlives its name. Without this check, writes to a removed folder would be lost silently.
        if self._descriptor < 0:
            raise StorageError(f"{self.path} is closed")
        there, mine = self.path.stat(), os.fstat(self._descriptor)
        if (there.st_ino, there.st_dev) != (mine.st_ino, mine.st_dev):
            raise StorageError(f"{self.path} was replaced by another process during the run")
