"""Compiled modules are cached if Python itself would not cache them, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import entry as bytecode

IMPORT = "from shoal.cli.entry import guarded; print(guarded(lambda: __import__('torch').CODE, []))"


def compiled_after(tmp_path: Path, **environment: str) -> set[str]:
    """The folders below the test's folder that contain the compiled module after a command imported it."""
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


def test_writable_installation_uses_pythons_cache(tmp_path: Path) -> None:
    assert compiled_after(tmp_path) == {"installed"}
    assert compiled_after(tmp_path, PYTHONDONTWRITEBYTECODE="1") == {"installed"}, "an existing file is used"


def test_bytecode_goes_to_the_user_cache_if_disabled(tmp_path: Path) -> None:
    assert compiled_after(tmp_path, PYTHONDONTWRITEBYTECODE="1") == {"cache"}


def test_user_location_is_kept(tmp_path: Path) -> None:
    own = {"PYTHONPYCACHEPREFIX": str(tmp_path / "own"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert compiled_after(tmp_path, **own) == set()


def test_missing_or_untrusted_home_is_not_used(tmp_path: Path) -> None:
    """Files in the folder are executed, so it must belong to this user only. The command runs without it."""
    assert compiled_after(tmp_path, PYTHONDONTWRITEBYTECODE="1", XDG_CACHE_HOME="relative") == set()
    (tmp_path / "file").touch()
    assert compiled_after(tmp_path, PYTHONDONTWRITEBYTECODE="1", XDG_CACHE_HOME=str(tmp_path / "file")) == set()
    (tmp_path / "cache" / "shoal" / "bytecode").mkdir(parents=True)
    (tmp_path / "cache" / "shoal" / "bytecode").chmod(0o777)
    assert compiled_after(tmp_path, PYTHONDONTWRITEBYTECODE="1") == set()


def test_without_a_home_every_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(bytecode, "_is_compiled_every_time", lambda: True)
    with bytecode.kept_bytecode():
        assert sys.pycache_prefix is None


def test_installation_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "largest").mkdir()
    (tmp_path / "largest" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bytecode, "LARGEST_PACKAGE", "largest")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not bytecode._is_compiled_every_time()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert bytecode._is_compiled_every_time()
