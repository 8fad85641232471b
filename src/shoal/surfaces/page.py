"""docs/coming-from.md, made from the tables: `python -m shoal.surfaces > docs/coming-from.md`.

A surface adds its tables to TABLES, and the page, its test and the check of every key follow.
"""

from __future__ import annotations

from shoal.config.fields import known_keys, section_at, walk_keys
from shoal.config.schema import RunConfig
from shoal.surfaces import launcher, recipe, seeds, trainer, trl
from shoal.surfaces.table import Row, Table

TABLES: tuple[Table, ...] = (
    seeds.QUICKSTART,
    seeds.TRAINER,
    trainer.ARGUMENTS,
    seeds.RECIPE,
    recipe.FIELDS,
    seeds.LAUNCHER,
    launcher.FIELDS,
    trl.TRAINER,
    trl.FIELDS,
    trl.INHERITED,
)
INTRO = """# Coming from elsewhere

What a name, a command or a path is called here. Schema keys are explained in [configuration.md](configuration.md). On
the command line they are overrides (`train.learning_rate=1e-5`), in `GRPOTrainer` and `Config` they go into
`overrides`. This page is generated: `python -m shoal.surfaces > docs/coming-from.md`.
"""


def page() -> str:
    contents = "\n".join(f"- [{table.title.replace('`', '')}](#{_anchor(table.title)})" for table in TABLES)
    return "\n".join([INTRO, contents, "", *(render(table) for table in TABLES)])


def render(table: Table) -> str:
    head = [f"## {table.title}", ""] + ([table.intro, ""] if table.intro else [])
    rows = [f"| {table.columns[0]} | {table.columns[1]} | |", "|---|---|---|", *(_line(row) for row in table.rows)]
    return "\n".join([*head, *rows, ""])


def _line(row: Row) -> str:
    ours = ", ".join(key if "`" in key else f"`{key}`" for key in row.keys) or "–"
    return f"| {_cell(f'`{row.theirs}`')} | {_cell(ours)} | {_cell(row.note)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def unknown_keys() -> list[str]:
    """Keys that a table names and the schema does not have."""
    known = {key.dotted for key in walk_keys(RunConfig)}
    named = [key for table in TABLES for row in table.rows for key in row.keys if "`" not in key]
    return [key for key in named if key not in known and not _free_form(key)]


def _free_form(key: str) -> bool:
    """Under a key whose value is free-form data, such as infer.engine_args."""
    *parent, _ = key.split(".")
    above = section_at(RunConfig, tuple(parent[:-1]))
    return above is not None and parent[-1] in known_keys(above) and section_at(RunConfig, tuple(parent)) is None
