"""Problems with a configuration, and their text: place, key, what is wrong, how to fix it.

load.py makes problems from pydantic's errors with `problems_from`. rules.py collects them as `Findings`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from shoal.config.fields import known_keys, nearest, sections_at, suggestion, variants_of
from shoal.config.yaml_text import KeyPath
from shoal.core.errors import ConfigError
from shoal.core.section import NAME_PATTERN, USER_CODE_PATTERN, Section

MAX_SHOWN = 12
REDACTED = "[hidden]"
_SECRET_ENDINGS = {"key", "secret", "password", "passwd", "token", "credential", "credentials", "authorization"}


@dataclass(frozen=True)
class Problem:
    path: KeyPath
    what: str
    fix: str = ""


@dataclass
class Origins:
    """Where each key was written: `train.yaml:12` or `command line`."""

    places: dict[KeyPath, str] = field(default_factory=dict)
    templates: dict[KeyPath, str] = field(default_factory=dict)
    default: str = "configuration"

    def at(self, path: KeyPath) -> str:
        """The place of the key, or of the innermost enclosing section that has a place."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.default

    def forget(self, path: KeyPath) -> None:
        """Drop the entries under `path`: an override replaced the value."""
        for table in (self.places, self.templates):
            for known in [known for known in table if known[: len(path)] == path]:
                del table[known]


@dataclass
class Findings:
    """Errors stop the command. Notices are printed as advice."""

    errors: list[Problem] = field(default_factory=list)
    notices: list[Problem] = field(default_factory=list)

    def error(self, path: str, what: str, fix: str = "") -> None:
        self.errors.append(Problem(split_path(path), what, fix))

    def notice(self, path: str, what: str, fix: str = "") -> None:
        self.notices.append(Problem(split_path(path), what, fix))

    def raise_errors(self, origins: Origins) -> None:
        if self.errors:
            raise ConfigError(render(self.errors, origins))

    def notice_lines(self) -> list[str]:
        return [": ".join((dotted(p.path), p.what)) + (f"; {p.fix}" if p.fix else "") for p in self.notices]


@contextmanager
def about(key: str) -> Iterator[None]:
    """Prefix configuration errors raised inside with the name of the key."""
    try:
        yield
    except ConfigError as error:
        error.args = (f"{key}: {error}", *error.args[1:])
        raise


def split_path(path: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in path.split(".")) if path else ()


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def render(problems: Iterable[Problem], origins: Origins) -> str:
    """One line per problem, at most MAX_SHOWN lines."""
    lines = []
    for problem in problems:
        key = f"{printable(dotted(problem.path))}: " if problem.path else ""
        fix = f"; {problem.fix}" if problem.fix else ""
        lines.append(printable(f"{origins.at(problem.path)}: {key}{problem.what}{fix}"))
    hidden = len(lines) - MAX_SHOWN
    return "\n".join(lines[:MAX_SHOWN] + ([f"… and {hidden} more"] if hidden > 0 else []))


def printable(text: str) -> str:
    """Escape control characters, so that text from files and arguments is safe to print on a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def is_secret(key: str | int) -> bool:
    return isinstance(key, str) and re.split(r"[_\-.]", key.lower())[-1] in _SECRET_ENDINGS


def show(value: Any, path: KeyPath = (), limit: int = 80) -> str:
    """A value as it would be written in YAML, shortened to `limit` characters, with secrets hidden."""
    if path and is_secret(path[-1]) and isinstance(value, str):
        return REDACTED
    try:
        text = json.dumps(redact(value), ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(text, text)
    return printable(text if len(text) <= limit else text[: limit - 3] + "…")


def redact(value: Any) -> Any:
    """The same data with the values of keys that look like secrets replaced."""
    if isinstance(value, Mapping):
        return {k: REDACTED if is_secret(k) and isinstance(v, str) else redact(v) for k, v in value.items()}
    return [redact(item) for item in value] if isinstance(value, list) else value


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
_CHOICES = {
    "literal_error": "expected",
    "union_tag_invalid": "expected_tags",
}  # error → the key of its context with the choices
_PATTERNS = {
    NAME_PATTERN: "a name of at most 64 letters, digits, dots, dashes and underscores",
    USER_CODE_PATTERN: "module:function, such as my_package.rewards:score",
}


def problems_from(error: ValidationError, root: type[Section], data: Mapping[str, Any]) -> list[Problem]:
    """One problem per key. The branches of a union become one problem."""
    grouped: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False, include_context=True):
        grouped.setdefault(_path_in(data, item["loc"], item["type"]), []).append(item)
    return [_problem(path, items, root, data) for path, items in grouped.items()]


def _path_in(data: Any, loc: tuple[Any, ...], kind: str) -> KeyPath:
    """`loc` without the parts that pydantic adds for unions and tags."""
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
    return (*path, "type") if kind == "union_tag_invalid" else tuple(path)


def _problem(path: KeyPath, items: list[Any], root: type[Section], data: Mapping[str, Any]) -> Problem:
    kind = items[0]["type"]
    if kind == "missing":
        return Problem(path, "is required but not set", _missing_fix(root, path))
    value = _value_at(data, path)
    if kind == "extra_forbidden" and (problem := _foreign_parameter(path, items[0], root, value)) is not None:
        return problem
    if kind == "extra_forbidden":
        return Problem(path, f"unknown key (value {show(value, path)})", suggestion(root, path[:-1], str(path[-1])))
    wanted = list(dict.fromkeys(_wanted(item) for item in items))
    fix = next((fix for item in items if (fix := _value_fix(item, value))), "")
    bounded = any(item["type"].startswith(("greater_than", "less_than")) for item in items)  # a number is valid as well
    if not fix and not bounded and (sections := sections_at(root, path)):
        fix = f"the keys of this section are {', '.join(known_keys(*sections))}"
    return Problem(path, f"must be {' or '.join(wanted)}, not {show(value, path)}", fix or _default_fix(root, path))


def _foreign_parameter(path: KeyPath, item: Mapping[str, Any], root: type[Section], value: Any) -> Problem | None:
    """The problem for a parameter of another variant than `type` selects, such as `kl_tau` with grpo."""
    variants, key = variants_of(sections_at(root, path[:-1])), str(path[-1])
    owners = [variant.choice() for variant in variants if key in variant.parameters()]
    if not owners:
        return None
    chosen = next(variant for variant in variants if variant.choice() == item["loc"][-2])
    own = ", ".join(chosen.parameters()) or "no parameters"
    what = f"is not a parameter of {chosen.choice()} (value {show(value, path)})"
    return Problem(path, what, f"it belongs to {', '.join(owners)}; {chosen.choice()} takes {own}")


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
    if kind in _CHOICES:
        choices = _choices(item)
        return "one of " * (len(choices) > 1) + ", ".join(choices)
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"text like {context['pattern']}")
    if kind == "string_too_short":
        return "non-empty text"
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    return item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _choices(item: Mapping[str, Any]) -> list[str]:
    return item["ctx"][_CHOICES[item["type"]]].replace("'", "").replace(" or ", ", ").split(", ")


def _value_fix(item: Mapping[str, Any], value: Any) -> str:
    if item["type"] in _CHOICES and isinstance(value, str):
        near = nearest(value, _choices(item))
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
    for key, inner in known_keys(*sections_at(root, path)).items():
        if inner.is_required():  # a section: name its required key
            words = (inner.description or "").partition(". ")[0].rstrip(".")
            return f"set {dotted((*path, key))} ({words[:1].lower()}{words[1:]})"
    info = known_keys(*sections_at(root, path[:-1])).get(str(path[-1]))
    return f"add it: {info.description}" if info is not None and info.description else "add it"


def _default_fix(root: type[Section], path: KeyPath) -> str:
    info = known_keys(*sections_at(root, path[:-1])).get(str(path[-1]))
    if info is None or info.default_factory is not None or info.is_required() or info.default is None:
        return "remove it to use the default"
    return f"the default is {show(info.default)}"
