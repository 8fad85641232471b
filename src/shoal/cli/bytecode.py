"""Compiled Python for installations that keep none."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

LARGEST = "torch"  # of what a run imports: it stands for all
OTHERS_WRITE = 0o022


@contextlib.contextmanager
def kept_bytecode() -> Iterator[None]:
    """In the user's cache, where Python keeps it nowhere else: many container images forbid it
    (PYTHONDONTWRITEBYTECODE) or are read-only, and then each start compiles four thousand modules anew.

    A PYTHONPYCACHEPREFIX is the user's own answer, and stands.
    """
    before = sys.pycache_prefix, sys.dont_write_bytecode
    if sys.pycache_prefix is None and _is_compiled_every_time() and (folder := _own_folder()) is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def _is_compiled_every_time() -> bool:
    spec = PathFinder.find_spec(LARGEST)
    if spec is None or spec.origin is None:
        return False
    compiled = Path(cache_from_source(spec.origin))
    folder = compiled.parent if compiled.parent.exists() else compiled.parent.parent
    return not compiled.exists() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK))


def _own_folder() -> Path | None:
    """One that this user alone writes: what lies in it is executed. None where there is no such place."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "shoal" / "bytecode"
        if not cache.is_absolute():
            return None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        return None
    own = found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE
    return folder if own and os.access(folder, os.W_OK) else None
