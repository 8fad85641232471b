"""Validates plain data, and reports the problems of the schema and of the rules together.

If the schema refuses some keys, the rules check the other keys. Rules that concern a refused key are left out, because
its default or a stand-in was checked in its place.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from shoal.config.problems import Findings, Origins, Problem, problems_from, render, show
from shoal.config.yaml_text import KeyPath
from shoal.core.errors import ConfigError
from shoal.core.section import Section

Config = TypeVar("Config", bound=Section)
Rules = Callable[[Config], Findings]
MAX_REPAIRS = 8
UNKNOWN = "(unknown)"
# Required keys. A section without a required key cannot be checked.
STAND_INS: dict[KeyPath, Any] = {
    ("train",): {},
    ("dataset",): {},
    ("orch",): {"env": [{"id": UNKNOWN}]},
    ("orch", "env"): [{"id": UNKNOWN}],
    ("orch", "env", "id"): UNKNOWN,
    ("orch", "eval", "env", "id"): UNKNOWN,
}


def validate(
    model: type[Config],
    data: Mapping[str, Any],
    origins: Origins,
    rules: Rules[Config] | None = None,
    section: str | None = None,
) -> Config:
    """The configuration. Raises one ConfigError with all problems. A configuration without problems is not given to
    `rules`, whose advice the caller needs too.

    `section`: the name of the section that `data` is.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        prefix = () if section is None else (section,)
        problems = _problems(error, model, data, prefix)
        part = _valid_part(model, data, problems, prefix) if rules is not None else None
        further = rules(part).errors if rules is not None and part is not None else []
        independent = [other for other in further if not any(_concerns(other, problem) for problem in problems)]
        raise ConfigError(render([*_with_templates(problems, origins), *independent], origins)) from None


def _problems(error: ValidationError, model: type[Section], data: Mapping[str, Any], prefix: KeyPath) -> list[Problem]:
    return [Problem((*prefix, *p.path), p.what, p.fix) for p in problems_from(error, model, data)]


def _with_templates(problems: Iterable[Problem], origins: Origins) -> list[Problem]:
    """A value from ${VAR} may be private, so the message shows the text of the file instead."""
    shown = []
    for problem in problems:
        text = origins.templates.get(problem.path)
        private = text is not None and ", not " in problem.what
        what = f"{problem.what.split(', not ')[0]}, not {show(text)}" if private else problem.what
        shown.append(Problem(problem.path, what, problem.fix))
    return shown


def _valid_part(
    model: type[Config], data: Mapping[str, Any], problems: list[Problem], prefix: KeyPath
) -> Config | None:
    """The configuration without the keys that have problems; None if there is none."""
    root: Any = copy.deepcopy(data)
    for name in reversed(prefix):
        root = {name: root}
    for _ in range(MAX_REPAIRS):
        for problem in problems:
            _repair(root, problem.path)
        part = _at(root, prefix)
        try:
            return model.model_validate(part)
        except ValidationError as error:
            problems = _problems(error, model, part, prefix)
    return None


def _repair(root: dict[str, Any], path: KeyPath) -> None:
    """Replace a required key by its stand-in. Remove another key, or if there is none, its section."""
    while path and isinstance(path[-1], int):
        path = path[:-1]  # all of the list: without one item, messages would name others by a wrong index
    if not path:
        return
    target = _at(root, path[:-1])
    stand_in = STAND_INS.get(tuple(part for part in path if isinstance(part, str)))
    if not isinstance(target, dict):
        _repair(root, path[:-1])
    elif stand_in is not None:
        target[str(path[-1])] = copy.deepcopy(stand_in)
    elif target.pop(str(path[-1]), None) is None:
        _repair(root, path[:-1])


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        else:
            data = data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None
    return data


def _concerns(other: Problem, refused: Problem) -> bool:
    """Whether a rule may have failed because of the refused key: one of the two messages names the other key."""
    shared = min(len(other.path), len(refused.path))
    return (
        other.path[:shared] == refused.path[:shared]
        or not _names(refused).isdisjoint(_words(other))
        or _key(other) in _words(refused)
        or UNKNOWN in other.what
    )


def _key(problem: Problem) -> str:
    return next((part for part in reversed(problem.path) if isinstance(part, str)), "")


def _names(problem: Problem) -> set[str]:
    """The key, and the key that was meant if it is misspelt."""
    return {_key(problem), *re.findall(r"`(?:[\w.]*\.)?(\w+)`", problem.fix)}


def _words(problem: Problem) -> set[str]:
    return set(re.findall(r"\w+", f"{problem.what} {problem.fix}"))
