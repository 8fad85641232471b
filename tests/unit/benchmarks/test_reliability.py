"""docs/reliability.md names only existing tests and is up to date."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def load_script():
    spec = importlib.util.spec_from_file_location("reliability", ROOT / "benchmarks" / "reliability.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists():
    script = load_script()
    named = [test for row in (*script.promises(), *script.FAULTS) for test in row.tests]
    assert len(named) > 50
    for test in named:
        file, name = test.split("::")
        assert name in functions_of(ROOT / "tests" / file), test


def test_page_is_up_to_date():
    assert (ROOT / "docs" / "reliability.md").read_text() == load_script().page()
