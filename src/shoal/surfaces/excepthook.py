"""Shows an uncaught ShoalError of a script as one line instead of a traceback.

Used by GRPOTrainer and the recipe. Scripts that catch the error, tools with their own excepthook (notebooks,
debuggers), and errors in user code are not affected.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from shoal.core.errors import ShoalError, UserCodeError

OURS = str(Path(__file__).parents[1])


@contextmanager
def one_line_if_uncaught(wording: Callable[[str], str] = str) -> Iterator[None]:
    """`wording` replaces schema keys in the message by arguments."""
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
    """True for frames of the user's script: not of Shoal, installed packages or the standard library."""
    installed = any(part in ("site-packages", "dist-packages") for part in Path(file).parts)
    return not (installed or file.startswith((OURS, "<", str(Path(traceback.__file__).parent))))
