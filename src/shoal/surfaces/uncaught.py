"""A wrong argument that nobody catches ends a script with one line that names it, not with Shoal's own frames.

Called by the Python surfaces around what they check. Whoever catches the error, or has a hook of their own (a notebook,
a debugger), sees what Python always shows.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from shoal.errors import ConfigError

OURS = str(Path(__file__).parents[1])


@contextmanager
def one_line_if_uncaught() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _hook
        raise


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ConfigError):
        sys.__excepthook__(kind, error, trace)
        return
    theirs = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(OURS)]
    place = f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}: " if theirs else ""
    print(f"{place}{error}", file=sys.stderr)
