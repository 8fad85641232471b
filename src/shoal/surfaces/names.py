"""Translates the arguments of another interface to the schema, and schema keys in messages back to the arguments.

`GRPOTrainer`, `recipes.Config` and the launcher declare each argument once, with a `Key`. The translation, the wording
of messages and docs/coming-from.md are derived from these declarations. No torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, NoReturn, get_args, get_type_hints

from shoal.config.load import load_data
from shoal.config.resolve import resolve_run
from shoal.config.rules import check_run
from shoal.config.schema import RunConfig
from shoal.core.errors import ArgumentError, ConfigError


@dataclass(frozen=True)
class Key:
    """The schema keys that an argument sets: `batch_size: Annotated[int, Key("orch.batch_size")]`."""

    to: str | tuple[str, ...] = ()
    note: str = ""  # for the documentation
    convert: Callable[[Any], Any] | None = None  # raises ValueError with what is wrong
    composed: bool = False  # translated by code of the interface, usually together with other arguments
    default: Any = None  # for the launcher, whose keys have no signature

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.to,) if isinstance(self.to, str) else self.to


@cache
def keys_of(surface: Any) -> dict[str, Key]:
    """The declared arguments of a function, or the fields of a dataclass and of the dataclasses in it (`tis.cap`)."""
    found: dict[str, Key] = {}
    for name, hint in get_type_hints(surface, include_extras=True).items():
        key = next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Key)), None)
        if key is not None:
            found[name] = key
        for inner in (hint, *get_args(hint), *(part for arg in get_args(hint) for part in get_args(arg))):
            if isinstance(inner, type) and is_dataclass(inner):
                found |= {f"{name}.{field}": value for field, value in keys_of(inner).items()}
    return found


def rows_of(keys: Mapping[str, Key]) -> tuple[KeyRow, ...]:
    return tuple(KeyRow(name, key.to, key.note) for name, key in keys.items())


def names_by_key(keys: Mapping[str, Key]) -> dict[str, str]:
    """Schema key → argument, for keys that only one argument sets."""
    names: dict[str, list[str]] = {}
    for name, key in keys.items():
        for target in key.keys:
            names.setdefault(target, []).append(name)
    return {target: found[0] for target, found in names.items() if len(found) == 1}


def replace_keys(text: str, names: Mapping[str, str]) -> str:
    """`text` with schema keys replaced by the names of an interface."""
    if not names:
        return text
    longest_first = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{longest_first})(?!\w)", lambda found: names[found[0]], text)


@dataclass(frozen=True)
class KeyRow:
    """A row of a documentation table: `theirs` becomes `ours` (schema keys, a command or a path; empty: nothing)."""

    theirs: str
    ours: str | tuple[str, ...] = ()
    note: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class KeyTable:
    title: str
    rows: tuple[KeyRow, ...]
    intro: str = ""
    columns: tuple[str, str] = ("there", "in Shoal")


class Translation:
    """Collects the schema values of one call, and makes the checked configuration."""

    def __init__(self, surface: str) -> None:
        self.surface = surface
        self.data: dict[str, Any] = {}
        self.arguments: dict[str, str] = {}  # schema key → argument
        self.also: dict[str, str] = {}  # further schema keys that messages may name → argument

    def put(self, argument: str, key: str, value: Any) -> None:
        *sections, last = key.split(".")
        target = self.data
        for name in sections:
            target = target.setdefault(name, {})
        target[last] = value
        self.arguments[key] = argument

    def put_declared(self, keys: Mapping[str, Key], values: Mapping[str, Any]) -> None:
        """Put every argument that is not `composed`. None keeps the default of the schema."""
        for argument, key in keys.items():
            value = values.get(argument)
            if key.composed or (value is None and key.convert is None):
                continue
            try:
                value = value if key.convert is None else key.convert(value)
            except ValueError as error:
                self.refuse(argument, str(error))
            for target in key.keys if value is not None else ():
                self.put(argument, target, value)

    def refuse(self, argument: str, what: str, fix: str = "") -> NoReturn:
        raise ArgumentError(f"{self.surface}: {argument}: {what}" + (f"; {fix}" if fix else ""))

    def pick(self, argument: str, given: Mapping[str, Any] | None, known: Mapping[str, str]) -> None:
        """Put a dictionary argument, whose keys are schema keys by `known`."""
        for name, value in (given or {}).items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                self.refuse(f"{argument}[{name!r}]", "is not known", _hint(near, known))
            self.put(f"{argument}[{name!r}]", known[name], value)

    def config(self, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
        """The resolved configuration, and notices."""
        try:
            loaded = load_data(self.data, overrides, self.surface)
            findings = check_run(loaded.config)
            findings.raise_errors(loaded.origins)
        except ConfigError as error:
            raise ArgumentError(self.reword(str(error))) from None
        return resolve_run(loaded.config), [self.reword(line) for line in findings.notice_lines()]

    def reword(self, text: str) -> str:
        """`text` with the arguments of this call in place of schema keys."""
        return replace_keys(text, {**self.also, **self.arguments})


def unknown_argument(surface: str, name: str, known: Iterable[str]) -> ArgumentError:
    known = list(known)
    return ArgumentError(
        f"{surface}: {name}: is not an argument; {_hint(difflib.get_close_matches(name, known, n=1), known)}"
    )


def _hint(near: Sequence[str], known: Iterable[str]) -> str:
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
