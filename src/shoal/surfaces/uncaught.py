"""An error of Shoal's that nobody catches ends a script with one line that names the argument, not with our frames.

Called by the Python surfaces around what they check and run. Whoever catches the error, or has a hook of their own (a
notebook, a debugger), sees what Python always shows; so does whoever's own code raised.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from shoal.errors import ShoalError, UserCodeError

OURS = str(Path(__file__).parents[1])


@contextmanager
def one_line_if_uncaught(wording: Callable[[str], str] = str) -> Iterator[None]:
    """`wording` puts the message into the words of the surface."""
    try:
        yield
    except ShoalError as error:
        error.args = (wording(str(error)), *error.args[1:])
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _hook
        raise


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ShoalError) or isinstance(error, UserCodeError):
        sys.__excepthook__(kind, error, trace)
        return
    theirs = [frame for frame in traceback.extract_tb(trace) if _is_theirs(frame.filename)]
    place = f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}: " if theirs else ""
    print(f"{place}{error}", file=sys.stderr)


def _is_theirs(file: str) -> bool:
    """Below the script come Shoal's own frames and those of what it calls: threads, asyncio, contexts."""
    installed = any(part in ("site-packages", "dist-packages") for part in Path(file).parts)
    return not (installed or file.startswith((OURS, "<", str(Path(traceback.__file__).parent))))
