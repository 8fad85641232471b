"""Compiled modules are kept where Python itself would keep none, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

IMPORT = "from shoal.cli.entry import guarded; print(guarded(lambda: __import__('torch').CODE, []))"


def compiled_after(tmp_path: Path, **environment: str) -> set[str]:
    """Folders, below the test's, that have the compiled module after a command imported it."""
    package = tmp_path / "installed" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("CODE = 0\n")
    path = os.pathsep.join([str(package.parent), *filter(None, sys.path)])
    settings = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env={**os.environ, **settings, **environment}, capture_output=True, text=True
    )
    assert done.stdout == "0\n", done.stderr
    found = [path for path in tmp_path.rglob("__init__*.pyc") if "torch" in path.parts]
    return {path.relative_to(tmp_path).parts[0] for path in found}


def test_an_ordinary_installation_is_left_to_python(tmp_path: Path) -> None:
    assert compiled_after(tmp_path) == {"installed"}
    assert compiled_after(tmp_path, PYTHONDONTWRITEBYTECODE="1") == {"installed"}, "what is there is used"


def test_where_none_is_written_the_users_cache_has_it(tmp_path: Path) -> None:
    assert compiled_after(tmp_path, PYTHONDONTWRITEBYTECODE="1") == {"cache"}


def test_the_users_own_place_stands(tmp_path: Path) -> None:
    own = {"PYTHONPYCACHEPREFIX": str(tmp_path / "own"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert compiled_after(tmp_path, **own) == set()
