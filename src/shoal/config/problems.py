"""A problem with a configuration and how it is put into words: where, which key, what was wrong, how to fix it.

load.py makes problems from the schema's own errors, checks.py from keys that do not go together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.config.yaml_text import KeyPath
from shoal.errors import ConfigError

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
        """The place of the key, or of the nearest section around it that was written anywhere."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.default

    def forget(self, path: KeyPath) -> None:
        """Drop what was known under `path`; an override replaced it."""
        for table in (self.places, self.templates):
            for known in [known for known in table if known[: len(path)] == path]:
                del table[known]


@dataclass
class Findings:
    """Errors stop the command; notices are advice and are printed."""

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
    """What is refused inside names the key it is about."""
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
    """One line a problem, at most one screen."""
    lines = []
    for problem in problems:
        key = f"{printable(dotted(problem.path))}: " if problem.path else ""
        fix = f"; {problem.fix}" if problem.fix else ""
        lines.append(printable(f"{origins.at(problem.path)}: {key}{problem.what}{fix}"))
    hidden = len(lines) - MAX_SHOWN
    return "\n".join(lines[:MAX_SHOWN] + ([f"… and {hidden} more"] if hidden > 0 else []))


def printable(text: str) -> str:
    """Control characters spelled out, so that nothing from a file or an argument reaches a terminal raw."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def is_secret(key: str | int) -> bool:
    return isinstance(key, str) and re.split(r"[_\-.]", key.lower())[-1] in _SECRET_ENDINGS


def show(value: Any, path: KeyPath = ()) -> str:
    """A value as it would be written in YAML, short, and never a secret."""
    if path and is_secret(path[-1]) and isinstance(value, str):
        return REDACTED
    try:
        text = json.dumps(redact(value), ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(text, text)
    return printable(text if len(text) <= 80 else text[:77] + "…")


def redact(value: Any) -> Any:
    """The same data with the values of secret-looking keys replaced."""
    if isinstance(value, Mapping):
        return {k: REDACTED if is_secret(k) and isinstance(v, str) else redact(v) for k, v in value.items()}
    return [redact(item) for item in value] if isinstance(value, list) else value
