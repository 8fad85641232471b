"""The configuration page, docs/configuration.md, made from the schema so that it cannot differ from it.

Called by `shoal config-reference`; a test compares the committed page with what comes out here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from shoal.config.base import NAME_PATTERN, USER_CODE_PATTERN, Section
from shoal.config.catalogue import CORRECTION_CATALOGUE, LOSS_ALIASES, LOSS_CATALOGUE, PartSpec
from shoal.config.fields import Key, field_names, walk_keys
from shoal.config.problems import show
from shoal.config.schema import RunConfig, SftConfig

INTRO = """# Configuration

A run is three sections: `train`, `infer` and `orch`, in three files (`shoal grpo --train T --infer I --orch O`) or in
one (`shoal grpo run.yaml`). Any key can be set on the command line: `train.learning_rate=1e-5`. `--dry-run` prints the
resolved configuration. Numbers are those of YAML 1.2, so `2e-4` is a number. `${VAR}` takes an environment variable. An
unknown key, a contradiction, or a knob that the chosen loss or layout cannot use is refused before anything loads.

This page is generated: `shoal config-reference > docs/configuration.md`.
"""
_NAMES = {int: "whole number", float: "number", bool: "true/false", str: "text", Any: "anything", type(None): ""}


def reference_page() -> str:
    return "\n".join([INTRO, *_sections(), *_losses(), *_sft()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    keys = list(walk_keys(RunConfig))
    for key in keys:
        if key.section is None:
            continue
        depth = len(key.path)
        suffix = " (a list)" if key.many else ""
        yield f"{'#' * min(depth + 1, 4)} {key.dotted}{suffix}\n"
        yield f"{key.info.description}\n"
        yield from _table([other for other in keys if other.path[:-1] == key.path])


def _sft() -> Iterator[str]:
    yield "## Supervised training\n"
    yield "`shoal sft` takes the same `train` section, without the keys that only GRPO uses, and:\n"
    keys = list(walk_keys(SftConfig))
    yield from _table([key for key in keys if key.path == ("batch_size",)])
    yield from _table([key for key in keys if key.path[:-1] == ("dataset",)], prefix="dataset.")


def _table(keys: list[Key], prefix: str = "") -> Iterator[str]:
    yield "| key | takes | default | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        name = " or ".join(f"`{prefix}{name}`" for name in field_names(key.path[-1], key.info))
        yield f"| {name} | {_cell(_takes(key))} | {_cell(_default(key))} | {_cell(key.info.description or '')} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _takes(key: Key) -> str:
    if key.section is not None:
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
    """Constraints inside `Annotated[...] | None`; those of a list's elements are not the list's."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from annotation.__metadata__
        yield from _metadata(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for arg in get_args(annotation):
            yield from _metadata(arg)


def _bounds(metadata: list[Any]) -> str:
    """`> 0`, `>= 0, <= 1`: whatever limits the metadata carries, once each."""
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


def _losses() -> Iterator[str]:
    yield "## Losses and their parameters\n"
    yield "| `train.loss.type` | what it is | parameters (default) | correction | KL | aggregation |"
    yield "|---|---|---|---|---|---|"
    for name, spec in LOSS_CATALOGUE.items():
        if name in LOSS_ALIASES:
            yield f"| `{name}` | another name of `{LOSS_ALIASES[name]}` | | | | |"
            continue
        correction, kl = ("yes" if flag else "no" for flag in (spec.takes_correction, spec.takes_kl))
        cells = (f"`{name}`", spec.summary, _parameters(spec), correction, kl, f"`{spec.default_aggregation}`")
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| `train.loss.correction.type` | what it is | parameters (default) |"
    yield "|---|---|---|"
    for name, part in CORRECTION_CATALOGUE.items():
        yield f"| `{name}` | {part.summary} | {_parameters(part)} |"
    yield ""


def _parameters(spec: PartSpec) -> str:
    shown = []
    for param in spec.params:
        default = f"= {param.same_as}" if param.same_as else "unset" if param.default is None else show(param.default)
        shown.append(f"`{param.name}` {default}".replace('"', ""))
    return ", ".join(shown) or "none"
