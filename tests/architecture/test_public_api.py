"""The public names and signatures equal the recorded list. A change here is a change for users.

After an intended change: python tests/architecture/test_public_api.py > tests/architecture/public_api.txt
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).parent / "public_api.txt"
MODULES = ("shoal", "shoal.recipes.rl_loop")


def public_names(module: Any) -> list[str]:
    return sorted(getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")])


def describe(name: str, found: Any) -> list[str]:
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return [f"{name}: enum {', '.join(member.name for member in found)}"]
    if isinstance(found, type):
        lines = [f"{name}{signature(found)}" if dataclasses.is_dataclass(found) else _class_line(name, found)]
        for method, value in sorted(vars(found).items()):
            if method.startswith("_"):
                continue
            if inspect.isfunction(value):
                lines.append(f"  .{method}{signature(value)}")
            elif isinstance(value, property):
                lines.append(f"  .{method}: property")
        return lines
    return [f"{name}{signature(found)}" if inspect.isroutine(found) else f"{name}: {type(found).__name__}"]


def signature(found: Any) -> str:
    """The signature that a caller sees, without the metadata of `Annotated`."""
    signature = inspect.signature(found)
    parameters = [p.replace(annotation=_without_metadata(p.annotation)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters))


def _without_metadata(annotation: Any) -> Any:
    if not isinstance(annotation, str) or not annotation.startswith("Annotated["):
        return annotation
    tree = ast.parse(annotation, mode="eval").body
    assert isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Tuple)
    return ast.unparse(tree.slice.elts[0])


def _class_line(name: str, found: type) -> str:
    return f"{name}{signature(found)}" if "__init__" in vars(found) else f"{name}: class"


def snapshot() -> str:
    lines: list[str] = []
    for path in MODULES:
        module = importlib.import_module(path)
        lines.append(f"[{path}]")
        for name in public_names(module):
            lines += describe(name, getattr(module, name))
        lines.append("")
    return "\n".join(lines)


def test_public_interface_is_unchanged():
    assert snapshot() == SNAPSHOT.read_text(encoding="utf-8"), "see the top of this file"


if __name__ == "__main__":
    print(snapshot(), end="")
