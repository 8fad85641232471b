"""Loads files and dotted overrides into a validated configuration, and records the place of every key for messages.

Called by the CLI and the launcher. `validate` reports the problems of the schema and of the rules (rules.py) together:
if the schema refuses some keys, the rules check the other keys. Rules that concern a refused key are left out, because
its default or a stand-in was checked in its place.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from shoal.config.fields import known_keys, nearest, sections_at, variants_of
from shoal.config.problems import Findings, Origins, Problem, printable, problems_from, render, show
from shoal.config.schema import SECTIONS, DpoConfig, RunConfig, SftConfig, SupervisedConfig
from shoal.config.yaml_text import KeyPath, Source, parse_yaml
from shoal.core.errors import ConfigError
from shoal.core.section import Section

MAX_FILE_BYTES = 1_000_000
COMMAND_LINE = "command line"
# Three keys for the length of a run: an override of one of them replaces the others from files.
LENGTH = (("train", "max_steps"), ("train", "epochs"), ("orch", "max_steps"))
# Split layout: keys that a section takes from `train` of the same file unless it sets them itself.
SHARED = {
    "infer": {("model",): "model", ("output_dir",): "output_dir"},
    "orch": {("model", "name"): "model", ("output_dir",): "output_dir"},
}
COMMANDS: dict[str, type[Section]] = {"grpo": RunConfig, SftConfig.verb: SftConfig, DpoConfig.verb: DpoConfig}
Config = TypeVar("Config", bound=Section)
Rules = Callable[[Config], Findings]
Supervised = TypeVar("Supervised", bound=SupervisedConfig)


@dataclass(frozen=True)
class ConfigDraft(Generic[Config]):
    config: Config
    origins: Origins


def load_run(
    run: str | None = None,
    *,
    parts: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    rules: Rules[RunConfig] | None = None,
) -> ConfigDraft[RunConfig]:
    """A whole run: one file with three sections, or one file per section (`parts`), plus overrides.

    If the schema refuses keys, `rules` find the problems of the other keys, here and in the other functions.
    """
    return _load(RunConfig, run, overrides, parts or {}, rules)


def load_data(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    source: str = "configuration",
    rules: Rules[RunConfig] | None = None,
) -> ConfigDraft[RunConfig]:
    """A run as plain data with the keys of the files, plus overrides. Messages name `source` as the place."""
    draft = _KeyReader(RunConfig)
    draft.data = copy.deepcopy(dict(data))
    draft.origins.default = source
    draft.override_all(overrides)
    return ConfigDraft(validate(RunConfig, draft.data, draft.origins, rules), draft.origins)


def load_supervised(
    kind: type[Supervised],
    file: str | None,
    overrides: Sequence[str] = (),
    rules: Rules[Supervised] | None = None,
) -> ConfigDraft[Supervised]:
    return _load(kind, file, overrides, rules=rules)


def load_section(
    name: str, file: str | None, overrides: Sequence[str] = (), rules: Rules[Any] | None = None
) -> ConfigDraft[Any]:
    """One section, for the commands of the split layout. The file may have the other sections too.

    Paths in messages start with the name of the section.
    """
    draft = _KeyReader(RunConfig)
    if file is not None:
        draft.add_file(file, () if _holds_sections(file) else (name,))
    draft.override_all(overrides, only=name)
    _share(draft.data, name)
    data = draft.data.get(name) or {}
    return ConfigDraft(validate(SECTIONS[name], data, draft.origins, rules, section=name), draft.origins)


def _share(data: dict[str, Any], name: str) -> None:
    """Copies the keys in SHARED from `train` to the section `name`."""
    train = data.get("train")
    for (*outer, last), shared in SHARED.get(name, {}).items():
        if not isinstance(train, dict) or train.get(shared) is None:
            continue
        place: Any = data
        for part in (name, *outer):
            if isinstance(place, dict) and place.get(part) is None:
                place[part] = {}
            place = place[part] if isinstance(place, dict) else None
        if isinstance(place, dict):  # other types are rejected by validation
            place.setdefault(last, train[shared])


def _holds_sections(file: str) -> bool:
    """True if the file configures a whole run."""
    value = parse_yaml(read_config_text(file), Source(printable(file)), os.environ).value
    return isinstance(value, dict) and bool(value) and set(value) <= set(SECTIONS)


def _load(
    model: type[Config],
    file: str | None,
    overrides: Sequence[str],
    parts: Mapping[str, str] | None = None,
    rules: Rules[Config] | None = None,
) -> ConfigDraft[Config]:
    draft = _KeyReader(model)
    if file is not None:
        draft.add_file(file, ())
    for name, part in (parts or {}).items():
        draft.add_file(part, (name,))
    draft.override_all(overrides)
    draft.drop_conflicting(LENGTH)
    return ConfigDraft(validate(model, draft.data, draft.origins, rules), draft.origins)


def read_config_text(file: str) -> str:
    """The text of a configuration file. Raises ConfigError if the file cannot be read as one."""
    shown, path = printable(file), Path(file)
    try:
        if path.is_dir():
            name = (
                "config.yaml" if (path / "config.yaml").is_file() else "run.yaml"
            )  # of a run directory, or written by a user
            raise ConfigError(f"{shown}: is a directory, not a configuration file; did you mean {shown}/{name}?")
        with path.open("rb") as content:
            raw = content.read(MAX_FILE_BYTES + 1)  # limited, since a device file has no end
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{shown}: is larger than {MAX_FILE_BYTES} bytes, too large for a configuration file")
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{shown}: no such file{_similar_file(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown}:{line}: is not UTF-8 text; save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown}: cannot be read: {reason}") from None


def _similar_file(path: Path) -> str:
    try:
        files = {entry.stem: entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")}
        near = files.get(nearest(path.stem, list(files)) or "")
    except OSError:
        return f"; the folder {printable(str(path.parent))} does not exist"
    return f"; did you mean {printable(str(path.parent / near))}?" if near else "; `shoal init DIR` writes examples"


class _KeyReader:
    """Collects plain data from files and overrides."""

    def __init__(self, model: type[Section]) -> None:
        self.model = model
        self.data: dict[str, Any] = {}
        self.origins = Origins(default=COMMAND_LINE)
        self._overridden: set[KeyPath] = set()

    def add_file(self, file: str, prefix: KeyPath) -> None:
        shown = printable(file)
        document = parse_yaml(read_config_text(file), Source(shown), os.environ)
        if not isinstance(document.value, dict):
            what = "is empty" if document.value is None else f"contains {show(document.value)}"
            raise ConfigError(f"{shown}:1: {what} instead of keys; write `key: value` lines")
        if prefix:
            self._refuse_other_section(document.value, str(prefix[0]), shown)
            self.data[str(prefix[0])] = document.value
        else:
            self._refuse_other_command(document.value, shown)
            self._refuse_single_section(document.value, shown)
            self.data = document.value
        for path, line in document.lines.items():
            self.origins.places[(*prefix, *path)] = f"{shown}:{line}"
        for path, text in document.templates.items():
            self.origins.templates[(*prefix, *path)] = text

    def _refuse_other_section(self, value: dict[str, Any], name: str, shown: str) -> None:
        """One message for orch.yaml passed with --infer, instead of one message per key."""
        if not all(section in self.model.model_fields for section in SECTIONS):
            return
        if value and set(value) <= set(SECTIONS):
            raise ConfigError(f"{shown}:1: has the sections of a whole run; pass it without --{name}")
        fits = {section: sum(key in known_keys(SECTIONS[section]) for key in value) for section in SECTIONS}
        best = max(fits, key=lambda section: fits[section])
        if value and fits[best] == len(value) and fits[name] * 2 <= len(value):
            raise ConfigError(f"{shown}:1: looks like the `{best}` section, but --{name} needs the `{name}` section")

    def _refuse_other_command(self, value: dict[str, Any], shown: str) -> None:
        """One message for the file of another command, instead of one message per key."""
        fits = [command for command, model in COMMANDS.items() if set(value) <= set(model.model_fields)]
        if fits and not set(value) <= set(self.model.model_fields):
            keys = ", ".join(value)
            raise ConfigError(f"{shown}:1: has the keys of `shoal {fits[0]}` ({keys}); run `shoal {fits[0]} {shown}`")

    def _refuse_single_section(self, value: dict[str, Any], shown: str) -> None:
        """One message for train.yaml passed as the file of a whole run, instead of one message per key."""
        sections = list(self.model.model_fields)
        if value and not any(key in sections for key in value):
            fits = {
                name: sum(key in SECTIONS[name].model_fields for key in value) for name in sections if name in SECTIONS
            }
            best = max(fits, key=lambda name: fits[name])
            hint = f"; it looks like the `{best}` section: pass it with --{best}, or put its keys under `{best}:`"
            first = printable(next(iter(value)))
            raise ConfigError(
                f"{shown}:1: {first}: is not a section; a file for a whole run has the sections "
                f"{', '.join(sections)}{hint if fits[best] else ''}"
            )

    def override_all(self, overrides: Sequence[str], only: str | None = None) -> None:
        """Raises one ConfigError for all overrides that cannot be applied."""
        refused = []
        for text in overrides:
            try:
                self.override(text, only)
            except ConfigError as error:
                refused.append(str(error))
        if refused:
            raise ConfigError("\n".join(refused))

    def override(self, text: str, only: str | None = None) -> None:
        key, equals, value_text = text.partition("=")
        shown = printable(text)
        if not equals or not key or key.startswith("-"):
            raise ConfigError(
                f"{COMMAND_LINE}: {shown}: is not an override; write section.key=value, e.g. train.learning_rate=1e-5"
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

    def drop_conflicting(self, keys: Sequence[KeyPath]) -> None:
        """If an override sets one of these keys, drop the values of the others that came from files."""
        if not self._overridden.intersection(keys):
            return
        for section, name in keys:
            if (section, name) not in self._overridden and isinstance(self.data.get(str(section)), dict):
                self.data[str(section)].pop(name, None)

    def _check_section(self, path: KeyPath, shown: str, only: str | None) -> None:
        sections = [only] if only else list(self.model.model_fields)
        first = str(path[0]) if path else ""
        held = sections_at(self.model, path)
        if first in sections and (len(path) > 1 or not held or variants_of(held)):
            return
        elsewhere = [name for name in sections if name in SECTIONS and first in SECTIONS[name].model_fields]
        near = nearest(first, sections)
        other = [command for command, model in COMMANDS.items() if first in model.model_fields]
        if other and self.model is not RunConfig:
            fix = f"it is a section of `shoal {other[0]}`"
        elif elsewhere:
            fix = f"write {elsewhere[0]}.{shown}"
        elif near and len(path) > 1:
            fix = f"did you mean `{near}.{'.'.join(map(str, path[1:]))}`?"
        else:
            fix = f"write {sections[0]}.key=value, with one of the sections {', '.join(sections)}"
        raise ConfigError(f"{COMMAND_LINE}: {shown}: {printable(first)!r} is not a section; {fix}")

    def _place(self, path: KeyPath, value: Any, shown: str) -> None:
        target: Any = self.data
        for part, following in itertools.pairwise(path):
            key = _slot(target, part, shown)
            if _missing(target, key):
                _assign(target, key, [] if isinstance(following, int) else {})
            target = target[key]
        _assign(target, _slot(target, path[-1], shown), value)


def _slot(target: Any, part: str | int, shown: str) -> Any:
    """The key or index of `part` in a mapping or list. The index after the last one appends."""
    if isinstance(target, dict):
        return str(part)
    if isinstance(target, list) and isinstance(part, int) and part <= len(target):
        return part
    if isinstance(target, str):
        raise ConfigError(
            f"{COMMAND_LINE}: {shown}: {printable(repr(target))} is a single value without keys; write all of it, "
            "e.g. orch.env='[{id: arithmetic, args: {level: 2}}]'"
        )
    raise ConfigError(f"{COMMAND_LINE}: {shown}: there is no key {printable(str(part))!r} to set")


def _missing(target: Any, key: Any) -> bool:
    return target.get(key) is None if isinstance(target, dict) else key == len(target)


def _assign(target: Any, key: Any, value: Any) -> None:
    if isinstance(target, list) and key == len(target):
        target.append(value)
    else:
        target[key] = value


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
