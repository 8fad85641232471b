"""What the verbs print. Results go to stdout, notices and errors to stderr; nothing reaches a terminal unescaped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from shoal.config.problems import printable
from shoal.observability.redact import redact


def complain(message: str) -> None:
    """An error: one line, or one line a problem. An indented line belongs to the one above."""
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


def _write(line: str) -> None:
    try:
        print(_safe(line, sys.stderr.encoding), file=sys.stderr)
    except OSError:  # full, or nobody listens: the exit code says it all the same
        mute(sys.stderr)


def mute(stream: TextIO) -> None:
    """What a stream still holds goes nowhere; Python would complain once more when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _safe(line: str, encoding: str | None) -> str:
    """Escaped, and without what the terminal's encoding lacks (LANG=C has no dashes or ellipses)."""
    encoding = encoding or "ascii"
    return printable(line).encode(encoding, errors="backslashreplace").decode(encoding)
