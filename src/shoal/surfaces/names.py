"""Translates the arguments of another interface to the schema, and schema keys in messages back to the arguments.

`GRPOTrainer`, `recipes.Config` and the launcher declare each argument once, with a `Key`. The translation, the wording
of messages and docs/coming-from/ are derived from these declarations. No torch.
"""

from __future__ import annotations

import difflib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, get_args, get_type_hints

from shoal.config.load import load_data
from shoal.config.resolve import resolve_run
from shoal.config.rules import check_run
from shoal.config.schema import RunConfig
from shoal.core.errors import ArgumentError, ConfigError, ShoalError, UserCodeError


@dataclass(frozen=True)
class Key:
    """The schema keys that an argument sets: `batch_size: Annotated[int, Key("orch.batch_size")]`."""

    to: str | tuple[str, ...] = ()
    note: str = ""  # for the documentation
    convert: Callable[[Any], Any] | None = None  # raises ValueError with what is wrong
    composed: bool = False  # translated by code of the interface, usually together with other arguments
    default: Any = None  # for the launcher, whose keys have no signature
    refused: bool = False  # a name of another system that Shoal does not support; `note` is the reason

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


def named_arguments(
    kind: type, synonyms: Mapping[str, str] | None = None, removed: Mapping[str, str] | None = None
) -> None:
    """Make a dataclass report all unknown arguments by name. `synonyms`: usual wrong name → field. `removed`: name in
    earlier versions of the other system → what to do."""
    fill: Callable[..., None] = kind.__init__
    defaults = {field.name: field.default for field in fields(kind)}

    @wraps(fill)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        to = Translation(kind.__name__, defaults)
        for name in (name for name in values if name not in defaults):
            to.refuse_unknown(name, defaults, (removed or {}).get(name), (synonyms or {}).get(name))
        with one_line_if_uncaught():
            to.raise_problems()
        fill(self, *args, **values)

    kind.__init__ = checked  # type: ignore[misc]


def rows_of(keys: Mapping[str, Key]) -> tuple[KeyRow, ...]:
    return tuple(KeyRow(name, key.to, key.note, key.refused) for name, key in keys.items())


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
    refused: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class KeyTable:
    title: str
    rows: tuple[KeyRow, ...]
    intro: str = ""
    columns: tuple[str, str] = ("In {system}", "In Shoal")


class Translation:
    """Collects the schema values and the problems of one call, and makes the checked configuration.

    `defaults` are the defaults of the arguments, which messages show.
    """

    def __init__(self, surface: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.surface = surface
        self.data: dict[str, Any] = {}
        self.arguments: dict[str, str] = {}  # schema key → argument
        self.also: dict[str, str] = {}  # further schema keys that messages may name → argument
        self.notices: list[str] = []
        self._defaults = defaults or {}
        self._problems: dict[str, str] = {}  # argument → line

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
                continue
            for target in key.keys if value is not None else ():
                self.put(argument, target, value)

    def refuse(self, argument: str, what: str, fix: str = "") -> None:
        """Record a problem. `raise_problems` and `config` raise all of them together."""
        line = f"{self.surface}: {argument}: {what}" + (f"; {fix}" if fix else "")
        self._problems.setdefault(argument, line + self._default_note(argument))

    def refuse_unknown(
        self, name: str, known: Iterable[str], elsewhere: str | None = None, near: str | None = None
    ) -> None:
        """Record an unknown argument, with `elsewhere` (where its meaning is set) or the nearest known name."""
        known = list(known)
        near = near or next(iter(difflib.get_close_matches(name, known, n=1)), None)
        hint = elsewhere or (f"did you mean {near}{self._default_of(near)}?" if near else _hint((), known))
        self._problems.setdefault(name, f"{self.surface}: {name}: is not an argument; {hint}")

    def pick(self, argument: str, given: Mapping[str, Any] | None, known: Mapping[str, str]) -> None:
        """Put a dictionary argument, whose keys are schema keys by `known`."""
        for name, value in (given or {}).items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                self.refuse(f"{argument}[{name!r}]", "is not known", _hint(near, known))
            else:
                self.put(f"{argument}[{name!r}]", known[name], value)

    @property
    def refused(self) -> list[str]:
        return list(self._problems)

    def raise_problems(self) -> None:
        if self._problems:
            raise ArgumentError("\n".join(self._problems.values())) from None

    def config(self, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
        """The resolved configuration, and notices. Raises one ArgumentError for all problems, one line for each."""
        try:
            loaded = load_data(self.data, overrides, self.surface, check_run)
            findings = check_run(loaded.config)
            findings.raise_errors(loaded.origins)
        except ConfigError as error:
            self._record(str(error))
            self.raise_problems()
            raise
        self.raise_problems()
        return resolve_run(loaded.config), [*self.notices, *(self.reword(line) for line in findings.notice_lines())]

    def _record(self, text: str) -> None:
        """Add the lines of an error of the schema, in words of this interface."""
        for line in text.splitlines():
            key = line.removeprefix(f"{self.surface}: ").partition(": ")[0]
            argument = self.arguments.get(key)
            if argument is not None:
                line = re.sub(r"; (the default is .*|remove it to use the default)$", "", line)
                line += self._default_note(argument, line)
            self._problems.setdefault(argument or line, self.reword(line))

    def _default_note(self, argument: str, line: str = "") -> str:
        default = self._defaults.get(argument)
        shown = isinstance(default, bool | int | float | str) and "default" not in line
        return f"; the default is {default!r}" if shown else ""

    def _default_of(self, argument: str) -> str:
        default = self._defaults.get(argument)
        return f" (default {default!r})" if isinstance(default, bool | int | float | str) else ""

    def reword(self, text: str) -> str:
        """`text` with the arguments of this call in place of schema keys."""
        return replace_keys(text, {**self.also, **self.arguments})


def _hint(near: Sequence[str], known: Iterable[str]) -> str:
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"


OURS = str(Path(__file__).parents[1])


@contextmanager
def one_line_if_uncaught(wording: Callable[[str], str] = str) -> Iterator[None]:
    """Show an uncaught ShoalError of a script as one line instead of a traceback.

    Scripts that catch the error, tools with their own excepthook (notebooks, debuggers), and errors in user code are
    not affected. `wording` replaces schema keys in the message by arguments.
    """
    try:
        yield
    except ShoalError as error:
        error.args = (wording(str(error)), *error.args[1:])
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _hook
        raise


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ShoalError) or isinstance(error, UserCodeError):
        sys.__excepthook__(kind, error, trace)
        return
    theirs = [frame for frame in traceback.extract_tb(trace) if _is_theirs(frame.filename)]
    place = f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}: " if theirs else ""
    print(f"{place}{error}", file=sys.stderr)


def _is_theirs(file: str) -> bool:
    """True for frames of the user's script: not of Shoal, installed packages or the standard library."""
    installed = any(part in ("site-packages", "dist-packages") for part in Path(file).parts)
    return not (installed or file.startswith((OURS, "<", str(Path(traceback.__file__).parent))))
