"""Read rows from JSONL, JSON, CSV and Parquet files. Called by `datasets.py`, which validates the rows.

A reader yields a `RawRow` for each row, valid or not. It raises only if the whole file is unreadable. Bytes that are
not UTF-8 are reported, never replaced.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError

MAX_ROW_BYTES = 16 * 2**20
MAX_ROW_LEVELS = 100  # of nested lists and objects; JSON writers fail at about 1,000
TOO_DEEP = f"nested over {MAX_ROW_LEVELS} levels deep"
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a file: `row`, or the `problem` with reading it."""

    where: str  # file:line
    row: dict[str, Any] | None = None
    problem: str | None = None


def read_file(path: Path, split: str) -> Iterator[RawRow]:
    """Read a file according to its suffix. `split` selects a list in a JSON file that contains several."""
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    suffix = path.suffix.lower()
    try:
        if suffix == ".json":
            yield from _read_json(path, split)
        elif suffix in readers:
            yield from readers[suffix](path)
        else:
            raise DataError(f"{path}: cannot read {suffix or 'a file without suffix'}; use {', '.join(SUFFIXES)}")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        # Split on \n only: str.splitlines would also split at U+2028, which JSON strings may contain.
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = _without_bom(line, path)
            if line.strip():
                yield _parse(line, f"{path}:{number}")


def _without_bom(data: bytes, path: Path) -> bytes:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: this is UTF-16; save it as UTF-8")
    return data.removeprefix(b"\xef\xbb\xbf")


def _parse(line: bytes, where: str) -> RawRow:
    if len(line) > MAX_ROW_BYTES:
        return RawRow(where, problem=f"a row of {len(line):,} bytes; the limit is {MAX_ROW_BYTES:,}")
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return RawRow(where, problem=f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return RawRow(where, problem=f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return RawRow(where, problem=f"not JSON: {error}")
    except RecursionError:
        return RawRow(where, problem=TOO_DEEP)
    return _object(row, where)


def _object(row: Any, where: str) -> RawRow:
    if not isinstance(row, dict):
        return RawRow(where, problem=f"the row is of type {type(row).__name__}, not an object with columns")
    return RawRow(where, row)


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested so deep that the row could be read, but not always written."""
    level = [value]
    for _ in range(MAX_ROW_LEVELS):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _read_json(path: Path, split: str) -> Iterator[RawRow]:
    try:
        content = json.loads(_without_bom(path.read_bytes(), path).decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{path}: a row is {TOO_DEEP}; remove it") from error
    if isinstance(content, dict):
        content = next((content[key] for key in (split, "data") if isinstance(content.get(key), list)), None)
    if not isinstance(content, list):
        raise DataError(f"{path}: needs a list of objects, or an object with a list under {split!r} or 'data'")
    for number, row in enumerate(content, start=1):
        yield _object(row, f"{path}:item {number}")


def _read_csv(path: Path) -> Iterator[RawRow]:
    # surrogateescape turns invalid bytes into lone surrogates, which the row checks report.
    text = _without_bom(path.read_bytes(), path).decode("utf-8", "surrogateescape")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield RawRow(f"{path}:{reader.line_num}", problem=str(error))
            continue
        if row is None:
            return
        where = f"{path}:{reader.line_num}"
        if None in row:
            yield RawRow(where, problem="more cells than columns in the header")
        else:
            yield RawRow(where, dict(row))


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow.parquet as parquet  # slow to import, and only this format needs it

    try:
        table = parquet.read_table(path)
        for number, row in enumerate(table.to_pylist(), start=1):
            yield RawRow(f"{path}:row {number}", row)
    except OSError:
        raise
    except Exception as error:  # pyarrow has its own exception types for broken files and encodings
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
