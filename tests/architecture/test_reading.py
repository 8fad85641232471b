"""docs/reading.md names every file of the core once, and each arrow of its diagram exists in the source."""

import ast
import re
from pathlib import Path

import pytest

from .test_core import CORE, SOURCE, imports_of

PAGE = Path(__file__).parents[2] / "docs" / "reading.md"
ARROW = re.compile(r"^(\S+) (→|⇢) (\S+?)(?: (\w+))?$")


def arrows() -> list[tuple[str, str, str, str]]:
    (diagram,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found = [ARROW.match(line) for line in diagram.splitlines()]
    assert all(found), "a line of the diagram is not an arrow"
    return [(match[1], match[2], match[3], match[4] or "") for match in found if match]


def module_of(name: str) -> str:
    return "shoal." + name.removesuffix(".py").replace("/", ".")


def imports(caller: str, target: str) -> bool:
    module = module_of(target)
    return any(name == module for name, _ in imports_of(SOURCE / caller))


def calls(caller: str, function: str) -> bool:
    """Whether a module calls a function, method or callback of this name, or passes it on."""
    names = {function, f"_{function}"}
    for node in ast.walk(ast.parse((SOURCE / caller).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in names:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            return True
    return False


def defines(target: str, function: str) -> bool:
    """Whether a module defines the function, or a class with a method of this name."""
    for node in ast.walk(ast.parse((SOURCE / target).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            return True
        if isinstance(node, ast.ClassDef) and node.name.lower() == function:
            return any(isinstance(item, ast.FunctionDef) and item.name == "__call__" for item in node.body)
    return False


@pytest.mark.parametrize(("caller", "kind", "target", "function"), arrows())
def test_each_arrow_is_an_import_or_a_call(caller: str, kind: str, target: str, function: str):
    if kind == "→":
        assert not function and imports(caller, target)
    else:
        assert calls(caller, function) and defines(target, function)


def test_diagram_is_connected():
    reached = {"cli/grpo.py"}
    for caller, _, target, _ in arrows():
        assert caller in reached, f"no arrow leads to {caller} before it calls"
        reached.add(target)


def test_check_detects_a_wrong_arrow():
    assert not imports("core/loop.py", "trainer/policy.py")
    assert not calls("core/loop.py", "forward_backward") and not defines("core/loop.py", "forward_backward")


def test_tour_names_every_file_of_the_core_once():
    tour = PAGE.read_text(encoding="utf-8").partition("## The core, in order")[2].partition("\n## ")[0]
    named = re.findall(r"^\*\*\[(\w+\.py)\]", tour, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in CORE if path.name != "__init__.py")
