"""Imports go downwards only: each package imports packages of smaller levels, and the core imports only itself."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shoal"

# A package may import packages of higher levels in this list. Packages of one level do not import each other.
LEVELS = [
    ["core"],
    ["config", "signals"],
    ["runs", "planning"],
    ["models", "rewards", "watch"],
    ["engine", "envs"],
    ["trainer", "server"],
    ["rollout"],
    ["build"],
    ["api", "demo"],
    ["split"],
    ["cli", "__main__"],
    ["surfaces"],
    ["grpo_trainer", "recipes", "launcher"],
    ["coming_from"],
]
BESIDE = {("__main__", "cli"), ("demo", "api")}
RANK = {package: level for level, packages in enumerate(LEVELS) for package in packages}
MODULES = sorted(SOURCE.rglob("*.py"))
PUBLIC_ALIASES = {"errors"}  # modules that re-export a core module under its public name


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_packages(path: Path) -> set[tuple[str, int]]:
    """Packages of Shoal that a module names in any import, also inside functions."""
    found: set[tuple[str, int]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it in full"
            module = node.module or ""
            names = [f"shoal.{alias.name}" for alias in node.names] if module == "shoal" else [module]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {(part[1], node.lineno) for part in parts if part[0] == "shoal" and len(part) > 1}
    return found


def upward_imports(path: Path) -> list[str]:
    package = package_of(path)
    if package in PUBLIC_ALIASES:
        return []
    wrong = []
    for other, line in sorted(imported_packages(path)):
        if other.startswith("__") or other == package or (package, other) in BESIDE:
            continue
        if package == "__init__" and other == "grpo_trainer":
            continue  # for type checkers; imported lazily at run time
        if package == "__init__" or RANK.get(other, len(LEVELS)) >= RANK[package]:
            wrong.append(f"{path.relative_to(SOURCE)}:{line}: {package} imports {other}")
    return wrong


def test_every_package_has_a_level():
    packages = {package_of(path) for path in MODULES} - {"__init__", "examples_data"} - PUBLIC_ALIASES
    assert packages <= set(RANK), f"packages without a level: {sorted(packages - set(RANK))}"


def test_imports_go_downwards():
    assert [problem for path in MODULES for problem in upward_imports(path)] == []


def test_check_detects_an_upward_import(tmp_path: Path):
    module = tmp_path / "module.py"
    module.write_text("def late():\n    from shoal.trainer import policy\n    import shoal.cli.grpo\n")
    assert {package for package, _ in imported_packages(module)} == {"trainer", "cli"}


def test_peft_is_imported_only_with_adapters():
    """Importing peft takes a second. Runs without adapters do not import it."""
    top = set()
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "peft":
                top.add(str(path.relative_to(SOURCE)))
    assert top == set()
