"""Arguments and file of the launcher to flat keys: dotted overrides, `${key}` references, the place of every value.

Knows which keys there are (keys.py) and nothing of what they mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.config.fields import nearest
from shoal.config.load import COMMAND_LINE, read_config_text
from shoal.config.problems import is_secret, printable
from shoal.config.yaml_text import Source, parse_yaml
from shoal.errors import ConfigError
from shoal.observability.redact import add_secret
from shoal.surfaces.launcher import KEYS

_REFERENCE = re.compile(r"\$\{([^}]*)\}")
USAGE = "python -m shoal.launcher.local script.py --config file.yaml [key=value …] [--dry-run] [--resume]"


@dataclass(frozen=True)
class Arguments:
    """What follows the script: the file, overrides, and what to do."""

    config: str
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    resume: bool = False


@dataclass
class Flat:
    """Dotted key → value, and where it was written. A key that was left out, or is null, is not in it."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value, else the launcher's default."""
        return self.values.get(key, KEYS[key].default)

    def at(self, key: str) -> str:
        return self.places.get(key, "default")

    def error(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.at(key)}: {key}: {what}")


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    config, overrides, flags = None, [], {"--dry-run": False, "--resume": False}
    words = iter(arguments)
    for word in words:
        if word == "--config" or word.startswith("--config="):
            config = word.partition("=")[2] if "=" in word else next(words, None)
            if not config:
                raise ConfigError(f"{COMMAND_LINE}: --config: names no file; {USAGE}")
        elif word in flags:
            flags[word] = True
        elif word.startswith("-") or "=" not in word:
            raise ConfigError(f"{COMMAND_LINE}: {printable(word)}: neither key=value nor a known flag; {USAGE}")
        else:
            overrides.append(word)
    if config is None:
        raise ConfigError(f"{COMMAND_LINE}: --config: is required; {USAGE}")
    return Arguments(config, tuple(overrides), flags["--dry-run"], flags["--resume"])


def read_flat(arguments: Arguments) -> Flat:
    """The file, then the overrides on top, then references: an override moves whatever refers to its key."""
    flat, shown = Flat(), printable(arguments.config)
    document = parse_yaml(read_config_text(arguments.config), Source(shown), os.environ, KEYS)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{shown}:1: holds no keys; write `key: value` lines")
    lines = {".".join(map(str, path)): line for path, line in document.lines.items()}
    for key, value in _flatten(document.value):
        _set(flat, key, value, f"{shown}:{lines.get(key, 1)}")
    for override in arguments.overrides:
        key, _, text = override.partition("=")
        value = parse_yaml(text, Source(f"{COMMAND_LINE}: {printable(key)}", has_lines=False), os.environ, KEYS).value
        for inner, item in _flatten({key: value}):
            _set(flat, inner, item, COMMAND_LINE)
    flat.values = {key: _follow(flat, key, (key,)) for key in flat.values}
    return flat


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        key = f"{prefix}{name}"
        if isinstance(item, Mapping) and key not in KEYS:
            yield from _flatten(item, f"{key}.")
        else:
            yield key, item


def _set(flat: Flat, key: str, value: Any, place: str) -> None:
    if key not in KEYS:
        sections = {name.rpartition(".")[0] for name in KEYS} - {""}
        if value is None and key in sections:
            return  # an empty section
        raise ConfigError(f"{place}: {printable(key)}: there is no such key; {_suggestion(key)}")
    flat.places[key] = place
    if is_secret(key) and value is not None:
        add_secret(str(value))
    if value is None:
        flat.values.pop(key, None)
    else:
        flat.values[key] = value


def _suggestion(key: str) -> str:
    last = key.rpartition(".")[2]
    same = [name for name in KEYS if name.rpartition(".")[2] == last]
    near = same[0] if same else nearest(key, list(KEYS))
    if near is None:
        by_word = nearest(last, [name.rpartition(".")[2] for name in KEYS])
        near = next((name for name in KEYS if name.rpartition(".")[2] == by_word), None)
    return f"did you mean `{near}`?" if near else "docs/launcher.md lists them all"


def _follow(flat: Flat, key: str, path: tuple[str, ...]) -> Any:
    """The value with `${other.key}` replaced; a value that is one reference keeps the type of what it names."""
    value = flat.get(key)
    if not isinstance(value, str) or "${" not in value:
        return value

    def target(name: str) -> Any:
        if name in path:
            raise flat.error(key, f"${{{name}}} refers to itself; write the value once")
        found = _follow(flat, name, (*path, name))
        if found is None:
            raise flat.error(key, f"${{{name}}} is not set; write {name}: … in the file, or {name}=… after it")
        return found

    whole = _REFERENCE.fullmatch(value)
    if whole:
        return target(whole.group(1))
    return _REFERENCE.sub(lambda match: str(target(match.group(1))), value)
