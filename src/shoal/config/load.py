"""Files and dotted overrides to a validated configuration, with the place of every key kept for messages.

Called by the CLI and the launcher. Reads text and environment variables only; whether keys go together is checks.py.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from shoal.config.base import Section
from shoal.config.fields import known_keys, nearest, section_at
from shoal.config.problems import Origins, Problem, printable, render, show
from shoal.config.schema import SECTIONS, RunConfig, SftConfig
from shoal.config.schema_errors import problems_from
from shoal.config.yaml_text import KeyPath, Source, parse_yaml
from shoal.errors import ConfigError

MAX_FILE_BYTES = 1_000_000
COMMAND_LINE = "command line"
# One matter in three places: what the command line says about it stands instead of all that files say.
LENGTH = (("train", "max_steps"), ("train", "epochs"), ("orch", "max_steps"))
# What a process of the split layout takes from the trainer's section of the same file, unless its own says it.
SHARED = {
    "infer": {("model",): "model", ("output_dir",): "output_dir"},
    "orch": {("model", "name"): "model", ("output_dir",): "output_dir"},
}
Config = TypeVar("Config", bound=Section)


@dataclass(frozen=True)
class Loaded(Generic[Config]):
    config: Config
    origins: Origins


def load_run(
    run: str | None = None, *, parts: Mapping[str, str] | None = None, overrides: Sequence[str] = ()
) -> Loaded[RunConfig]:
    """A whole run: one file with three sections, or `parts` naming a file for each section, and overrides on top."""
    return _load(RunConfig, run, parts or {}, overrides)


def load_data(
    data: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "configuration"
) -> Loaded[RunConfig]:
    """A run given as plain data under the names of the files, by `source`; overrides as on the command line."""
    draft = _Draft(RunConfig)
    draft.data = copy.deepcopy(dict(data))
    draft.origins.default = source
    for override in overrides:
        draft.override(override)
    return Loaded(draft.validate(), draft.origins)


def load_sft(file: str | None, overrides: Sequence[str] = ()) -> Loaded[SftConfig]:
    return _load(SftConfig, file, {}, overrides)


def load_section(name: str, file: str | None, overrides: Sequence[str] = ()) -> Loaded[Any]:
    """One section alone, for the commands of the split layout; the file may hold the others too.

    Paths in messages start with the section's name.
    """
    draft = _Draft(RunConfig)
    if file is not None:
        draft.add_file(file, () if _holds_sections(file) else (name,))
    for override in overrides:
        draft.override(override, only=name)
    _share(draft.data, name)
    data = draft.data.get(name) or {}
    try:
        config = SECTIONS[name].model_validate(data)
    except ValidationError as error:
        problems = problems_from(error, SECTIONS[name], data)
        moved = [Problem((name, *problem.path), problem.what, problem.fix) for problem in problems]
        raise ConfigError(render(moved, draft.origins)) from None
    return Loaded(config, draft.origins)


def _share(data: dict[str, Any], name: str) -> None:
    """What a run's file says once, in `train`, holds for its other sections."""
    train = data.get("train")
    for (*outer, last), shared in SHARED.get(name, {}).items():
        if not isinstance(train, dict) or train.get(shared) is None:
            continue
        place: Any = data
        for part in (name, *outer):
            if isinstance(place, dict) and place.get(part) is None:
                place[part] = {}
            place = place[part] if isinstance(place, dict) else None
        if isinstance(place, dict):  # anything else is refused where it stands
            place.setdefault(last, train[shared])


def _holds_sections(file: str) -> bool:
    """Whether this is a file for a whole run."""
    value = parse_yaml(read_config_text(file), Source(printable(file)), os.environ).value
    return isinstance(value, dict) and bool(value) and set(value) <= set(SECTIONS)


def _load(model: type[Config], file: str | None, parts: Mapping[str, str], overrides: Sequence[str]) -> Loaded[Config]:
    draft = _Draft(model)
    if file is not None:
        draft.add_file(file, ())
    for name, part in parts.items():
        draft.add_file(part, (name,))
    for override in overrides:
        draft.override(override)
    draft.displace(LENGTH)
    return Loaded(draft.validate(), draft.origins)


def read_config_text(file: str) -> str:
    """The text of a configuration file; anything that is not one is refused in words."""
    shown, path = printable(file), Path(file)
    try:
        if path.is_dir():
            name = "config.yaml" if (path / "config.yaml").is_file() else "run.yaml"  # a run's own, or a person's
            raise ConfigError(
                f"{shown}: is a directory, not a configuration file; name the file in it, as {shown}/{name}"
            )
        with path.open("rb") as content:
            raw = content.read(MAX_FILE_BYTES + 1)  # of a device there is no end
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{shown}: larger than {MAX_FILE_BYTES} bytes; that is not a configuration file")
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{shown}: no such file{_similar_file(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown}:{line}: not UTF-8 text; save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown}: cannot be read: {reason}") from None


def _similar_file(path: Path) -> str:
    try:
        files = {entry.stem: entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")}
        near = files.get(nearest(path.stem, list(files)) or "")
    except OSError:
        return f"; the folder {printable(str(path.parent))} does not exist either"
    return f"; did you mean {printable(str(path.parent / near))}?" if near else "; `shoal init DIR` writes examples"


class _Draft(Generic[Config]):
    """Plain data on its way to a config: files are merged in, then overrides, then it is validated."""

    def __init__(self, model: type[Config]) -> None:
        self.model = model
        self.data: dict[str, Any] = {}
        self.origins = Origins(default=COMMAND_LINE)
        self._overridden: set[KeyPath] = set()

    def add_file(self, file: str, prefix: KeyPath) -> None:
        shown = printable(file)
        document = parse_yaml(read_config_text(file), Source(shown), os.environ)
        if not isinstance(document.value, dict):
            what = "is empty" if document.value is None else f"holds {show(document.value)}"
            raise ConfigError(f"{shown}:1: {what}, not keys with values; write `key: value` lines")
        if prefix:
            self._refuse_other_section(document.value, str(prefix[0]), shown)
            self.data[str(prefix[0])] = document.value
        else:
            self._refuse_loose_section(document.value, shown)
            self.data = document.value
        for path, line in document.lines.items():
            self.origins.places[(*prefix, *path)] = f"{shown}:{line}"
        for path, text in document.templates.items():
            self.origins.templates[(*prefix, *path)] = text

    def _refuse_other_section(self, value: dict[str, Any], name: str, shown: str) -> None:
        """orch.yaml given with --infer: one message instead of one a key."""
        if not all(section in self.model.model_fields for section in SECTIONS):
            return
        if value and set(value) <= set(SECTIONS):
            raise ConfigError(f"{shown}:1: has the sections of a whole run; give it alone, without --{name}")
        fits = {section: sum(key in known_keys(SECTIONS[section]) for key in value) for section in SECTIONS}
        best = max(fits, key=lambda section: fits[section])
        if value and fits[best] == len(value) and fits[name] * 2 <= len(value):
            raise ConfigError(f"{shown}:1: looks like the `{best}` section; the `{name}` section is wanted here")

    def _refuse_loose_section(self, value: dict[str, Any], shown: str) -> None:
        """A train.yaml given where one file with sections is expected: one message instead of forty."""
        sections = list(self.model.model_fields)
        if value and not any(key in sections for key in value):
            fits = {
                name: sum(key in SECTIONS[name].model_fields for key in value) for name in sections if name in SECTIONS
            }
            best = max(fits, key=lambda name: fits[name])
            hint = f"; this looks like the `{best}` section: give it with --{best}, or put its keys under `{best}:`"
            first = printable(next(iter(value)))
            raise ConfigError(
                f"{shown}:1: {first}: not a section; one file for a whole run has the sections "
                f"{', '.join(sections)}{hint if fits[best] else ''}"
            )

    def override(self, text: str, only: str | None = None) -> None:
        key, equals, value_text = text.partition("=")
        shown = printable(text)
        if not equals or not key or key.startswith("-"):
            raise ConfigError(
                f"{COMMAND_LINE}: {shown}: not an override; write section.key=value, as train.learning_rate=1e-5"
            )
        path: KeyPath = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        self._check_section(path, shown, only)
        document = parse_yaml(value_text, Source(f"{COMMAND_LINE}: {printable(key)}", has_lines=False), os.environ)
        self.origins.forget(path)
        self._place(path, document.value, shown)
        if document.value is not None:
            self._overridden.add(path)
        for inner in document.lines:
            self.origins.places[(*path, *inner)] = COMMAND_LINE
        for inner, template in document.templates.items():
            self.origins.templates[(*path, *inner)] = template

    def displace(self, keys: Sequence[KeyPath]) -> None:
        """Where an override sets one of these keys, a file's values of the others are left out."""
        if not self._overridden.intersection(keys):
            return
        for section, name in keys:
            if (section, name) not in self._overridden and isinstance(self.data.get(str(section)), dict):
                self.data[str(section)].pop(name, None)

    def _check_section(self, path: KeyPath, shown: str, only: str | None) -> None:
        sections = [only] if only else list(self.model.model_fields)
        first = str(path[0]) if path else ""
        if first in sections and (len(path) > 1 or section_at(self.model, path) is None):
            return
        elsewhere = [name for name in sections if name in SECTIONS and first in SECTIONS[name].model_fields]
        near = nearest(first, sections)
        if elsewhere:
            fix = f"write {elsewhere[0]}.{shown}"
        elif near and len(path) > 1:
            fix = f"did you mean `{near}.{'.'.join(map(str, path[1:]))}`?"
        else:
            fix = f"start with one of {', '.join(sections)}, as {sections[0]}.key=value"
        raise ConfigError(f"{COMMAND_LINE}: {shown}: {printable(first)!r} is not a section with a key; {fix}")

    def _place(self, path: KeyPath, value: Any, shown: str) -> None:
        target: Any = self.data
        for part, following in itertools.pairwise(path):
            key = _slot(target, part, shown)
            if _missing(target, key):
                _assign(target, key, [] if isinstance(following, int) else {})
            target = target[key]
        _assign(target, _slot(target, path[-1], shown), value)

    def validate(self) -> Config:
        try:
            return self.model.model_validate(self.data)
        except ValidationError as error:
            problems = problems_from(error, self.model, self.data)
            raise ConfigError(render(self._with_templates(problems), self.origins)) from None

    def _with_templates(self, problems: list[Problem]) -> list[Problem]:
        """A value that came from ${VAR} may be private: the message shows the text of the file instead."""
        shown = []
        for problem in problems:
            text = self.origins.templates.get(problem.path)
            what = (
                problem.what.split(", not ")[0] + f", not {show(text)}"
                if text and ", not " in problem.what
                else problem.what
            )
            shown.append(Problem(problem.path, what, problem.fix))
        return shown


def _slot(target: Any, part: str | int, shown: str) -> Any:
    """The key or index that `part` means in a mapping or list; one past the end of a list appends."""
    if isinstance(target, dict):
        return str(part)
    if isinstance(target, list) and isinstance(part, int) and part <= len(target):
        return part
    raise ConfigError(f"{COMMAND_LINE}: {shown}: there is nothing with the key {printable(str(part))!r} to set")


def _missing(target: Any, key: Any) -> bool:
    return target.get(key) is None if isinstance(target, dict) else key == len(target)


def _assign(target: Any, key: Any, value: Any) -> None:
    if isinstance(target, list) and key == len(target):
        target.append(value)
    else:
        target[key] = value
