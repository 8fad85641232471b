"""Turns pydantic's errors into problems a person can act on. Called by load.py only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shoal.config.base import NAME_PATTERN, USER_CODE_PATTERN, Section
from shoal.config.fields import known_keys, nearest, section_at, suggestion
from shoal.config.problems import Problem, dotted, show
from shoal.config.yaml_text import KeyPath

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
}
_PATTERNS = {
    NAME_PATTERN: "a name of letters, digits, dots, dashes and underscores (at most 64)",
    USER_CODE_PATTERN: "module:function, as in my_package.rewards:score",
}


def problems_from(error: ValidationError, root: type[Section], data: Mapping[str, Any]) -> list[Problem]:
    """One problem a key; the branches of a union are told as one."""
    grouped: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False, include_context=True):
        grouped.setdefault(_path_in(data, item["loc"], item["type"]), []).append(item)
    return [_problem(path, items, root, data) for path, items in grouped.items()]


def _path_in(data: Any, loc: tuple[Any, ...], kind: str) -> KeyPath:
    """`loc` without what pydantic adds for unions and tags, and ending where the user's data ends."""
    path: list[str | int] = []
    value = data
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if in_list or (isinstance(value, Mapping) and part in value):
            value = value[part]
        elif not (last and kind in ("missing", "extra_forbidden")):
            continue
        path.append(part)
    return tuple(path)


def _problem(path: KeyPath, items: list[Any], root: type[Section], data: Mapping[str, Any]) -> Problem:
    kind = items[0]["type"]
    if kind == "missing":
        return Problem(path, "is required but not set", _missing_fix(root, path))
    value = _value_at(data, path)
    if kind == "extra_forbidden":
        return Problem(path, f"unknown key (value {show(value, path)})", suggestion(root, path[:-1], str(path[-1])))
    wanted = list(dict.fromkeys(_wanted(item) for item in items))
    fix = next((fix for item in items if (fix := _value_fix(item, value))), "")
    bounded = any(item["type"].startswith(("greater_than", "less_than")) for item in items)  # it may be a number too
    if not fix and not bounded and (section := section_at(root, path)) is not None:
        fix = f"its keys are {', '.join(known_keys(section))}"
    return Problem(path, f"must be {' or '.join(wanted)}, not {show(value, path)}", fix or _default_fix(root, path))


def _value_at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


def _wanted(item: Mapping[str, Any]) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind in _TYPES:
        return _TYPES[kind]
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return words.format(f"{context[name]:g}")
    if kind == "literal_error":
        return (
            "one of " + _choices(context["expected"])
            if " or " in context["expected"]
            else _choices(context["expected"])
        )
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"text like {context['pattern']}")
    if kind == "string_too_short":
        return "text that is not empty"
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    return item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _choices(expected: str) -> str:
    return expected.replace("'", "").replace(" or ", ", ")


def _value_fix(item: Mapping[str, Any], value: Any) -> str:
    if item["type"] == "literal_error" and isinstance(value, str):
        near = nearest(value, _choices(item["ctx"]["expected"]).split(", "))
        return f"did you mean `{near}`?" if near else ""
    if isinstance(value, str) and item["type"] in ("int_type", "float_type", "bool_type"):
        return _unquote_fix(value, item["type"])
    return ""


def _unquote_fix(value: str, kind: str) -> str:
    if kind == "bool_type":
        word = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.lower())
        return f"write {word}" if word else ""
    try:
        return "write the number without quotes" if math.isfinite(float(value)) else ""
    except ValueError:
        return ""


def _missing_fix(root: type[Section], path: KeyPath) -> str:
    section, missing = section_at(root, path[:-1]), section_at(root, path)
    for key, inner in known_keys(missing).items() if missing else ():
        if inner.is_required():  # of a section, what it cannot be without
            words = (inner.description or "").rstrip(".")
            return f"set {dotted((*path, key))} ({words[:1].lower()}{words[1:]})"
    info = known_keys(section).get(str(path[-1])) if section else None
    return f"add it: {info.description}" if info is not None and info.description else "add it"


def _default_fix(root: type[Section], path: KeyPath) -> str:
    section = section_at(root, path[:-1])
    info = known_keys(section).get(str(path[-1])) if section else None
    if info is None or info.default_factory is not None or info.is_required() or info.default is None:
        return "leave it out for the default"
    return f"the default is {show(info.default)}"
