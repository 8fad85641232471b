"""Imports go downwards only, and the three rooms beside each other never meet."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shoal"

# A room may import from the levels below its own; rooms on one level do not import each other.
LEVELS = [
    ["launcher"],
    ["cli", "__main__"],
    ["grpo_trainer", "recipes"],
    ["split"],
    ["api"],
    ["demo"],
    ["report"],
    ["build"],
    ["orchestrator"],
    ["rollout", "trainer", "transport"],
    ["server"],
    ["engine"],
    ["models"],
    ["envs", "rewards"],
    ["algorithms"],
    ["batching"],
    ["observability"],
    ["surfaces"],
    ["config"],
    ["types", "protocols", "errors"],
]
# Neighbours that belong together: protocols speak of types, and environments grade with the shared graders.
BESIDE = {("protocols", "types"), ("envs", "rewards"), ("rewards", "envs"), ("__main__", "cli")}
RANK = {room: len(LEVELS) - level for level, rooms in enumerate(LEVELS) for room in rooms}
MODULES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[tuple[str, int]]:
    """Rooms of shoal that a module names in any import, also inside functions."""
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


def test_every_room_has_a_level():
    rooms = {room_of(path) for path in MODULES} - {"__init__", "examples_data"}
    assert rooms <= set(RANK), f"rooms without a level: {sorted(rooms - set(RANK))}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path: Path):
    room = room_of(path)
    wrong = []
    for other, line in imported_rooms(path):
        if other.startswith("__") or other == room or (room, other) in BESIDE:
            continue
        if room == "__init__" and other == "grpo_trainer":
            continue  # for type checkers; at run time it is loaded when it is asked for
        if room == "__init__" or RANK.get(other, len(LEVELS)) >= RANK[room]:
            wrong.append(f"line {line}: {room} imports {other}")
    assert not wrong, wrong


def test_the_check_sees_an_upward_import(tmp_path: Path):
    module = tmp_path / "module.py"
    module.write_text("def late():\n    from shoal.trainer import policy\n    import shoal.cli.grpo\n")
    assert {room for room, _ in imported_rooms(module)} == {"trainer", "cli"}


def test_peft_is_imported_where_an_adapter_is():
    """It takes a second that a run without adapters need not wait; an export, which merges them, has it at the top."""
    top = set()
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "peft":
                top.add(str(path.relative_to(SOURCE)))
    assert top == {"models/export.py"}
