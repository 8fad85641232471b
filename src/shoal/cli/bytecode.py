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


@contextlib.contextmanager
def kept_bytecode() -> Iterator[None]:
    """In the user's cache, where Python keeps it nowhere else: many container images forbid it
    (PYTHONDONTWRITEBYTECODE) or are read-only, and then each start compiles four thousand modules anew.

    A PYTHONPYCACHEPREFIX is the user's own answer, and stands.
    """
    before = sys.pycache_prefix, sys.dont_write_bytecode
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    if sys.pycache_prefix is None and cache.is_absolute() and _is_compiled_every_time():
        sys.pycache_prefix, sys.dont_write_bytecode = str(cache / "shoal" / "bytecode"), False
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
