"""Rows and tables, and the translation of a surface's arguments onto the schema with errors in the surface's words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from shoal.config.checks import check_run
from shoal.config.load import load_data
from shoal.config.problems import split_path
from shoal.config.resolve import resolve_run
from shoal.config.schema import RunConfig
from shoal.errors import ArgumentError, ConfigError


@dataclass(frozen=True)
class Row:
    """`theirs` becomes `ours`: schema keys, a command or a path. Empty: it has no counterpart."""

    theirs: str
    ours: str | tuple[str, ...] = ()
    note: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class Table:
    title: str
    rows: tuple[Row, ...]
    intro: str = ""
    columns: tuple[str, str] = ("there", "in Shoal")

    def in_their_words(self, text: str) -> str:
        """Schema keys replaced by the names here, where one name alone sets the key."""
        names: dict[str, list[str]] = {}
        for row in self.rows:
            for key in row.keys:
                names.setdefault(key, []).append(row.theirs)
        return replace_keys(text, {key: found[0] for key, found in names.items() if len(found) == 1})


def replace_keys(text: str, names: Mapping[str, str]) -> str:
    for key in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.]){re.escape(key)}(?![\w])", lambda _, key=key: names[key], text)
    return text


class Translation:
    """Collects what the arguments of one call mean in the schema, and turns it into a checked configuration."""

    def __init__(self, surface: str) -> None:
        self.surface = surface
        self.data: dict[str, Any] = {}
        self.arguments: dict[str, str] = {}  # schema key → argument
        self.also: dict[str, str] = {}  # keys that follow one of these, which messages may name

    def put(self, argument: str, key: str, value: Any) -> None:
        *sections, last = key.split(".")
        target = self.data
        for name in sections:
            target = target.setdefault(name, {})
        target[last] = value
        self.arguments[key] = argument

    def put_all(self, values: Mapping[str, tuple[str, Any]]) -> None:
        """Argument → (key, value); None leaves the schema's own default in place."""
        for argument, (key, value) in values.items():
            if value is not None:
                self.put(argument, key, value)

    def refuse(self, argument: str, what: str, fix: str = "") -> NoReturn:
        raise ArgumentError(f"{self.surface}: {argument}: {what}" + (f"; {fix}" if fix else ""))

    def pick(self, argument: str, given: Mapping[str, Any] | None, known: Mapping[str, str]) -> None:
        """A dictionary argument: each of its keys is a schema key of its own."""
        if given is not None and not isinstance(given, Mapping):
            self.refuse(argument, f"must be a dictionary, not {type(given).__name__}")
        for name, value in (given or {}).items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                self.refuse(f"{argument}[{name!r}]", "is not known", _hint(near, known))
            self.put(f"{argument}[{name!r}]", known[name], value)

    def config(self, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
        """The resolved configuration and what there is to advise."""
        try:
            loaded = load_data(self.data, overrides, self.surface)
            findings = check_run(loaded.config)
            findings.raise_errors(loaded.origins)
        except ConfigError as error:
            raise ArgumentError(self.in_their_words(str(error))) from None
        return resolve_run(loaded.config), [self.in_their_words(line) for line in findings.notice_lines()]

    def in_their_words(self, text: str) -> str:
        """Schema keys replaced by the arguments they came from."""
        return replace_keys(text, {**self.also, **self.arguments})

    def value(self, key: str) -> Any:
        found: Any = self.data
        for part in split_path(key):
            found = found[part]
        return found


def unknown_argument(surface: str, name: str, known: Iterable[str]) -> ArgumentError:
    known = list(known)
    return ArgumentError(
        f"{surface}: {name}: is not an argument; {_hint(difflib.get_close_matches(name, known, n=1), known)}"
    )


def _hint(near: Sequence[str], known: Iterable[str]) -> str:
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
