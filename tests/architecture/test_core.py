"""The core imports nothing but itself, NumPy, msgspec and pydantic; torch only where tensors are computed."""

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
CORE = sorted((SOURCE / "core").glob("*.py"))
LIBRARIES = {"numpy", "msgspec", "pydantic"}
TORCH = {"loss_inputs.py", "losses.py", "objective.py", "terms.py"}  # losses and terms, for type checkers only


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Imports of a module, also inside functions: full names for modules of Shoal, first names for other packages."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"shoal.{alias.name}" for alias in node.names] if module == "shoal" else [module]
        else:
            continue
        found += [(name if name.startswith("shoal.") else name.partition(".")[0], node.lineno) for name in names]
    return found


def violations(path: Path) -> list[str]:
    allowed = LIBRARIES | set(sys.stdlib_module_names) | ({"torch"} if path.name in TORCH else set())
    return [
        f"{path.name}:{line} imports {name}"
        for name, line in imports_of(path)
        if not (name.startswith("shoal.core") if name.startswith("shoal.") else name in allowed)
    ]


def test_core_imports_only_itself():
    assert [wrong for path in CORE for wrong in violations(path)] == []


def test_core_size_is_bounded():
    files = [path for path in CORE if path.name != "__init__.py"]
    assert len(files) <= 25
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 4_600


def test_check_detects_imports_of_other_packages(tmp_path: Path):
    module = tmp_path / "module.py"
    module.write_text("import json\n\n\ndef late():\n    import torch\n    from shoal.config import load\n")
    assert [wrong.split()[-1] for wrong in violations(module)] == ["torch", "shoal.config"]
