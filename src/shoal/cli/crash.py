"""The crash bundle: what a bug report needs, in one file. Written for exceptions that are not ShoalErrors."""

from __future__ import annotations

import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.observability.redact import redact

_run_folder: list[Path] = []


def note_run_folder(folder: Path) -> None:
    """A crash from now on is written there, if the folder exists by then."""
    _run_folder[:] = [folder]


def write_crash_bundle(error: BaseException, arguments: Sequence[str]) -> Path | str:
    text = redact(_bundle_text(error, arguments))
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    for folder in [*(known for known in _run_folder if known.is_dir()), Path(tempfile.gettempdir())]:
        with suppress(OSError):
            path = folder / name
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return path
    return "no file, since none could be written"


def _bundle_text(error: BaseException, arguments: Sequence[str]) -> str:
    import shoal

    versions = f"shoal {shoal.__version__}, Python {platform.python_version()}, {platform.platform()}"
    loaded = sorted(name for name in ("torch", "transformers", "peft", "numpy") if name in sys.modules)
    modules = ", ".join(f"{name} {getattr(sys.modules[name], '__version__', '?')}" for name in loaded)
    trace = "".join(traceback.format_exception(error))
    return f"{versions}\n{modules}\narguments: {list(arguments)!r}\n\n{trace}"
