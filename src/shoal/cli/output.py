"""Printing. Results go to stdout, notices and errors to stderr. Control characters are escaped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from shoal.config.problems import printable
from shoal.runs.secrets import redact


def complain(message: str) -> None:
    """Print an error: one line, or one line per problem. An indented line belongs to the line above."""
    lines = redact(message).splitlines() or ["failed"]
    problems = [line for line in lines if not line.startswith(" ")]
    if len(problems) == 1:
        for line in [f"shoal: error: {lines[0]}", *lines[1:]]:
            _write(line)
        return
    shown = [line for line in problems if not line.startswith("…")]
    _write(f"shoal: {len(shown)}{' of several' if len(shown) < len(problems) else ''} errors:")
    for line in lines:
        _write(f"  {line}")


def notices(lines: Iterable[str]) -> None:
    for line in lines:
        _write(f"note: {redact(line)}")


def say(text: str) -> None:
    """A result, on stdout. Line breaks are kept."""
    for line in redact(text).splitlines() or [""]:
        print(_safe(line, sys.stdout.encoding))


def say_at_once(line: str) -> None:
    """A line on stdout that another program waits for."""
    say(line)
    sys.stdout.flush()


def _write(line: str) -> None:
    try:
        print(_safe(line, sys.stderr.encoding), file=sys.stderr)
    except OSError:  # a full disk or a closed pipe: the exit code still reports the error
        mute(sys.stderr)


def mute(stream: TextIO) -> None:
    """Discard the buffer of a stream. Otherwise Python reports the error again when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _safe(line: str, encoding: str | None) -> str:
    """Escape control characters and characters that the encoding lacks (LANG=C has no dashes or ellipses)."""
    encoding = encoding or "ascii"
    return printable(line).encode(encoding, errors="backslashreplace").decode(encoding)
