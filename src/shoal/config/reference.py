"""Generates docs/configuration.md from the schema (`shoal config-reference`).

`python -m shoal.config.reference PAGE` updates the parameter tables of another page. Tests compare the committed pages
with the output.
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from shoal.config.fields import Key, field_names, mark_of, sections_at, sections_of, variants_of, walk_keys
from shoal.config.preference import PREFERENCE_LOSSES
from shoal.config.problems import show, split_path
from shoal.config.schema import SECTIONS, DpoConfig, RunConfig, SftConfig
from shoal.core.losses import BUILT_IN, CustomLoss
from shoal.core.section import NAME_PATTERN, USER_CODE_PATTERN, Section, Variant
from shoal.core.terms import CORRECTIONS

INTRO = """# Configuration

A run has three sections: `train`, `infer` and `orch`, in three files (`shoal grpo --train T --infer I --orch O`) or in
one (`shoal grpo run.yaml`). Any key can be set on the command line: `train.learning_rate=1e-5`. `--dry-run` prints the
resolved configuration. Files are YAML 1.2, so `2e-4` is a number. `${VAR}` is replaced by the environment variable.
Shoal reports unknown keys, contradictions, and keys without effect before it loads the model.

Editors with a YAML language server complete and check the files of `shoal init` and `shoal envs new`. For another
YAML file, run `shoal schema > run.schema.json` and make `# yaml-language-server: $schema=run.schema.json` its first
line. `shoal schema train` (or `infer`, `orch`, `sft`, `dpo`) prints the schema of one section or of a supervised run.
`shoal --install-completion` installs completion for the current shell.

This page is generated: `shoal config-reference > docs/configuration.md`.
"""
SCHEMA_LINE = "# yaml-language-server: $schema="  # in YAML files: editors check the file against this schema
_MARKS = {
    "grpo_only": "*GRPO only.*",
    "not_sft": "*GRPO and DPO only.*",
    "split_only": "*Split layout only.*",
    "server_only": "*vLLM and SGLang only.*",
    "binding": "*Cannot change on resume.*",
}
_NAMES = {int: "whole number", float: "number", bool: "true/false", str: "text", Any: "anything", type(None): ""}


def reference_page() -> str:
    return "\n".join([INTRO, *_sections(), *_losses(), *_supervised()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    keys = list(walk_keys(RunConfig))
    for key in keys:
        if not key.sections:
            continue
        depth = len(key.path)
        suffix = " (a list)" if key.many else ""
        yield f"{'#' * min(depth + 1, 4)} {key.dotted}{suffix}\n"
        yield f"{key.info.description}\n"
        inside = [other for other in keys if other.path[:-1] == key.path]
        variants = variants_of(key.sections)
        shared = [other for other in inside if not any(other.path[-1] in v.parameters() for v in variants)]
        yield from _table(shared, choices=variants)
        yield from parameter_table(variants)


def _supervised() -> Iterator[str]:
    yield "## Supervised training\n"
    yield "`shoal sft` uses the same `train` section without the keys for GRPO, plus these keys:\n"
    keys = list(walk_keys(SftConfig))
    yield from _table([key for key in keys if key.path == ("batch_size",)])
    yield from _table([key for key in keys if key.path[:-1] == ("dataset",)], prefix="dataset.")
    yield "## Preference training\n"
    yield "`shoal dpo` has the keys of `shoal sft`, and these:\n"
    variants = variants_of(sections_at(DpoConfig, ("loss",)))
    shared = [key for key in walk_keys(DpoConfig) if key.path[:-1] == ("loss",)]
    shared = [key for key in shared if not any(key.path[-1] in variant.parameters() for variant in variants)]
    yield from _table(shared, prefix="loss.", choices=variants)
    yield from parameter_table(variants)


def _table(keys: list[Key], prefix: str = "", choices: Sequence[type[Variant]] = ()) -> Iterator[str]:
    yield "| key | type | default | description |"
    yield "|---|---|---|---|"
    for key in keys:
        name = " or ".join(f"`{prefix}{name}`" for name in field_names(key.path[-1], key.info))
        selects = bool(choices) and key.path[-1] == "type"
        takes = ", ".join(f"`{choice.choice()}`" for choice in choices) if selects else _takes(key)
        yield f"| {name} | {table_cell(takes)} | {table_cell(_default(key))} | {table_cell(_meaning(key))} |"
    yield ""


def _meaning(key: Key) -> str:
    return " ".join([key.info.description or "", *(text for mark, text in _MARKS.items() if mark_of(key.info, mark))])


def table_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _takes(key: Key) -> str:
    if key.sections:
        other = "a number or a " if key.path[-1] == "temperature" else ""
        return f"{other}list of sections, below" if key.many else f"{other}section, below"
    words = [word for word in dict.fromkeys(_words(key.info.annotation)) if word]
    bounds = _bounds([*key.info.metadata, *_metadata(key.info.annotation)])
    return " or ".join(words) + (f" {bounds}" if bounds else "")


def _words(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if annotation in _NAMES:
        yield _NAMES[annotation]
    elif origin is Annotated:
        yield from _pattern_words(annotation)
    elif origin is Literal:
        yield ", ".join(f"`{value}`" for value in get_args(annotation))
    elif origin in (Union, types.UnionType):
        for arg in get_args(annotation):
            yield from _words(arg)
    elif origin is list:
        yield f"list of {' or '.join(_words(get_args(annotation)[0]))}"
    elif origin is dict:
        yield "mapping"
    else:
        yield str(annotation)


def _pattern_words(annotation: Any) -> Iterator[str]:
    patterns = [getattr(item, "pattern", None) for item in annotation.__metadata__]
    if NAME_PATTERN in patterns:
        yield "name"
    elif USER_CODE_PATTERN in patterns:
        yield "module:function"
    else:
        yield from _words(get_args(annotation)[0])


def _metadata(annotation: Any) -> Iterator[Any]:
    """Constraints inside `Annotated[...] | None`, without those of the elements of a list."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from annotation.__metadata__
        yield from _metadata(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for arg in get_args(annotation):
            yield from _metadata(arg)


def _bounds(metadata: list[Any]) -> str:
    """The limits in the metadata, such as `>= 0, <= 1`."""
    found: dict[str, str] = {}
    for item in metadata:
        for holder in (item, *getattr(item, "metadata", ())):
            for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
                limit = getattr(holder, name, None)
                if isinstance(limit, int | float):
                    found.setdefault(name, f"{sign} {limit:g}")
    return ", ".join(found.values())


def _default(key: Key) -> str:
    if key.info.is_required():
        return "required"
    value = key.info.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None or isinstance(value, Section):
        return ""
    return f"`{show(value)}`"


def parameter_table(variants: Sequence[type[Variant]]) -> Iterator[str]:
    """The parameters of each variant, with bounds and defaults."""
    if not variants:
        return
    yield "| `type` | key | type | default | description |"
    yield "|---|---|---|---|---|"
    for variant in variants:
        for name, info in variant.parameters().items():
            key = Key((name,), info, sections_of(info.annotation))
            cells = (_takes(key), _default(key) or "unset", info.description or "")
            yield f"| `{variant.choice()}` | `{name}` | {' | '.join(map(table_cell, cells))} |"
    yield ""


def with_tables(page: str) -> str:
    """The text of a page with the table below each `<!-- parameters of KEY -->` regenerated."""

    def table(found: re.Match[str]) -> str:
        variants = variants_of(sections_at(RunConfig, split_path(found[2])))
        return found[1] + "\n".join(parameter_table(variants))

    return re.sub(r"(<!-- parameters of (\S+) -->\n)(?:\|.*\n)*", table, page)


def _losses() -> Iterator[str]:
    yield "## Losses and corrections\n"
    yield "| `train.loss.type` | loss | correction | KL | aggregation |"
    yield "|---|---|---|---|---|"
    for loss in BUILT_IN:
        names = ", ".join(f"`{name}`" for name in (loss.choice(), *loss.aliases))
        correction, kl = ("yes" if flag else "no" for flag in (loss.takes_correction, loss.takes_kl))
        yield f"| {names} | {loss.summary()} | {correction} | {kl} | `{loss().default_aggregation}` |"
    yield ""
    yield "| `train.loss.correction.type` | correction |"
    yield "|---|---|"
    for correction in CORRECTIONS:
        yield f"| `{correction.choice()}` | {correction.summary()} |"
    yield ""


def json_schema(name: str = "run") -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors: of a run, an sft or dpo run, or one section."""
    root = {"run": RunConfig, "sft": SftConfig, "dpo": DpoConfig, **SECTIONS}[name]
    schema = root.model_json_schema(by_alias=True, mode="validation")
    for title, section in {**schema.get("$defs", {}), root.__name__: schema}.items():
        _complete_schema(title, section)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _complete_schema(title: str, section: dict[str, Any]) -> None:
    """Adds what pydantic does not know: aliases, when `type` is required, and `dataset` in place of `env`."""
    properties = section.get("properties", {})
    for variant in (*BUILT_IN, CustomLoss, *CORRECTIONS, *PREFERENCE_LOSSES):
        if title == variant.__name__:
            base = variant.base()
            if variant is not CustomLoss:
                properties["type"] = {"enum": [variant.choice(), *variant.aliases]}
            properties["type"]["description"] = base.model_fields["type"].description
            if variant.choice() != base.choice():  # without `type` the default of the base class is selected
                section["required"] = ["type"]
    for model in SECTIONS.values():
        for field, info in model.model_fields.items() if title == model.__name__ else ():
            first, *others = field_names(field, info)
            properties.update(dict.fromkeys(others, properties[first]))
    if title == "OrchConfig":
        section["anyOf"] = [{"required": [key]} for key in ("env", "dataset")]
        del section["required"]


def schema_file(name: str) -> tuple[str, str]:
    """The name and text of the schema file that a generated configuration refers to."""
    return f"{name}.schema.json", json.dumps(json_schema(name), indent=1) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(with_tables(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
