"""Generates the tables of arguments in docs/environments.md: `python -m shoal.envs.reference docs/environments.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.envs.registry import BUILT_IN, PACKAGES, arguments_of, shown_default


def argument_table(environment: type) -> Iterator[str]:
    yield "| Argument | Default | |"
    yield "|---|---|---|"
    for name, argument in arguments_of(environment).model_fields.items():
        default = shown_default(argument)
        shown = default if default in ("required", "built-in", "unset") else f"`{default}`"
        yield f"| `{name}` | {shown} | {argument.description} |"


def with_tables(page: str) -> str:
    """Return the page with the table below each `<!-- arguments of ID -->` generated again."""
    environments = {**BUILT_IN, **{prefix.rstrip(":"): environment for prefix, environment in PACKAGES.items()}}

    def table(found: re.Match[str]) -> str:
        return found[1] + "".join(f"{line}\n" for line in argument_table(environments[found[2]]))

    return re.sub(r"(<!-- arguments of (\S+) -->\n)(?:\|.*\n)*", table, page)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(with_tables(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
