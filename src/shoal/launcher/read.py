"""Reads the arguments and the file of the launcher into flat keys, and parses `allocation_mode`.

The grammar of `allocation_mode` is `backend[.|:]dims`, joined by `+` (separate devices) or `|` (shared devices):
`sglang.d1p1t1+d1p1t1` or `vllm:d2t1|fsdp:d2`. Dims are d (data), p (pipeline), t (tensor), c (context) and e (expert)
with their counts.
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
from shoal.core.errors import ConfigError
from shoal.launcher.keys import KEYS
from shoal.runs.secrets import add_secret

ENGINES = ("embedded", "vllm", "sglang")
TRAINERS = ("fsdp",)
NAMES = {"d": "data", "p": "pipeline", "t": "tensor", "c": "context", "e": "expert"}
EXAMPLES = "embedded:d1|fsdp:d1 or sglang.d1p1t1+d1p1t1"
_PART = re.compile(r"(?:(?P<backend>[A-Za-z][A-Za-z_-]*)[.:])?(?P<dims>(?:[a-z]\d+)+)\Z")


class AllocationError(ValueError):
    """A problem with an allocation. The message follows `allocation_mode:`."""


@dataclass(frozen=True)
class Part:
    backend: str | None
    dims: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, letter: str) -> int:
        return self.dims.get(letter, 1)


@dataclass(frozen=True)
class Allocation:
    engine: str
    replicas: int
    tensor_ranks: int
    gpus: int  # for training

    def schema_values(self, *, starts_server: bool = True) -> dict[str, Any]:
        values: dict[str, Any] = {"infer.engine": self.engine, "train.gpus": self.gpus}
        if self.gpus > 1:  # fsdp is the default backend; a single device cannot shard
            values["train.sharding"] = "fsdp"
        if self.engine != "embedded" and starts_server:  # training may use the same device
            values |= {"infer.dp": self.replicas, "infer.tp": self.tensor_ranks, "infer.gpu_memory_utilization": 0.5}
        return values

    @property
    def without_server(self) -> str:
        """An equivalent allocation without a server."""
        return works_everywhere(self.gpus)


def works_everywhere(gpus: int) -> str:
    return f"allocation_mode=embedded:d{gpus}|fsdp:d{gpus}"


def parse_allocation(text: Any) -> Allocation:
    if not isinstance(text, str) or not text.strip():
        raise AllocationError(f"needs a backend and dimensions, such as {EXAMPLES}")
    separators = re.findall(r"[+|]", text)
    parts = [_part(piece.strip()) for piece in re.split(r"[+|]", text)]
    if len(parts) > 2:
        raise AllocationError(f"{text!r} has {len(parts)} parts; write one for the engine and one for training")
    engine, trainer = _roles(parts, text)
    _check_trainer(trainer)
    return _combine(engine, trainer, shared=separators != ["+"])


def _part(piece: str) -> Part:
    found = _PART.match(piece)
    if found is None:
        raise AllocationError(f"{piece!r} is not a backend with dimensions; write {EXAMPLES}")
    backend = found["backend"]
    if backend is not None and backend not in (*ENGINES, *TRAINERS):
        raise AllocationError(f"there is no backend {backend!r}; the backends are {', '.join((*ENGINES, *TRAINERS))}")
    pairs = re.findall(r"([a-z])(\d+)", found["dims"])
    letters = [letter for letter, _ in pairs]
    for letter, count in pairs:
        if letter not in NAMES:
            raise AllocationError(
                f"{piece!r} has the unknown dimension {letter!r}; the dimensions are {', '.join(NAMES)}"
            )
        if letters.count(letter) > 1 or int(count) < 1:
            raise AllocationError(f"{piece!r}: {letter} must appear once, with a count of at least 1")
    return Part(backend, {letter: int(count) for letter, count in pairs})


def _roles(parts: list[Part], text: str) -> tuple[Part, Part]:
    """The parts for sampling and for training. A single part is used for both, with the embedded engine."""
    if len(parts) == 1:
        (only,) = parts
        if only.backend in ("vllm", "sglang"):
            raise AllocationError(f"{text!r} has no part for training; write {text}+d1")
        return Part("embedded", only.dims), Part("fsdp", only.dims)
    engines = [part for part in parts if part.backend in ENGINES]
    trainers = [part for part in parts if part.backend not in ENGINES]
    if len(engines) != 1:
        raise AllocationError(f"{text!r} needs one part for the engine ({', '.join(ENGINES)}) and one for training")
    return engines[0], trainers[0]


def _check_trainer(part: Part) -> None:
    for letter in "ptce":
        if part[letter] > 1:
            raise AllocationError(
                f"{letter}{part[letter]}: the trainer has no {NAMES[letter]} parallelism; use {letter}1 and more d"
            )


def _combine(engine: Part, trainer: Part, *, shared: bool) -> Allocation:
    gpus, name = trainer["d"], engine.backend or "embedded"
    works = works_everywhere(gpus)
    if name != "embedded":
        return _beside_server(engine, gpus, shared=shared)
    for letter in "ptce":
        if engine[letter] > 1:
            raise AllocationError(f"{letter}{engine[letter]}: the embedded engine does not split a model; use {works}")
    if engine["d"] != gpus:
        raise AllocationError(
            f"the embedded engine uses the training devices, but d is {engine['d']} and {gpus}; use {works}"
        )
    return Allocation(name, engine["d"], engine["t"], gpus)


def _beside_server(engine: Part, gpus: int, *, shared: bool) -> Allocation:
    name = engine.backend or ""
    for letter in "pce":
        if engine[letter] > 1:
            raise AllocationError(f"{letter}{engine[letter]}: {name} supports d and t only; use {letter}1 and more t")
    if shared and engine["d"] * engine["t"] != gpus:
        raise AllocationError("parts joined by | share devices, so both must have the same number")
    if gpus > 1:
        raise AllocationError(
            f"d{gpus}: with {name} the launcher trains in one process; use d1, or `shoal grpo --layout split` for "
            f"more (docs/layouts.md), or {works_everywhere(gpus)}"
        )
    return Allocation(name, engine["d"], engine["t"], gpus)


_REFERENCE = re.compile(r"\$\{([^}]*)\}")
USAGE = "python -m shoal.launcher.local script.py --config file.yaml [key=value …] [--dry-run] [--resume]"


@dataclass(frozen=True)
class Arguments:
    """The arguments after the script: the file, overrides and flags."""

    config: str
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    resume: bool = False


@dataclass
class FlatKeys:
    """Dotted key → value, and the place of each. Keys that are absent or null are left out."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value, or the default of the launcher."""
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
                raise ConfigError(f"{COMMAND_LINE}: --config: needs a file; {USAGE}")
        elif word in flags:
            flags[word] = True
        elif word.startswith("-") or "=" not in word:
            raise ConfigError(f"{COMMAND_LINE}: {printable(word)}: is neither key=value nor a known flag; {USAGE}")
        else:
            overrides.append(word)
    if config is None:
        raise ConfigError(f"{COMMAND_LINE}: --config: is required; {USAGE}")
    return Arguments(config, tuple(overrides), flags["--dry-run"], flags["--resume"])


def read_flat(arguments: Arguments) -> FlatKeys:
    """The file, then overrides, then references, so that references see overridden values."""
    flat, shown = FlatKeys(), printable(arguments.config)
    document = parse_yaml(read_config_text(arguments.config), Source(shown), os.environ, KEYS)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{shown}:1: contains no keys; write `key: value` lines")
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


def _set(flat: FlatKeys, key: str, value: Any, place: str) -> None:
    if key not in KEYS:
        sections = {name.rpartition(".")[0] for name in KEYS} - {""}
        if value is None and key in sections:
            return  # an empty section
        raise ConfigError(f"{place}: {printable(key)}: unknown key; {_suggestion(key)}")
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
    return f"did you mean `{near}`?" if near else "docs/launcher.md lists all keys"


def _follow(flat: FlatKeys, key: str, path: tuple[str, ...]) -> Any:
    """The value with `${other.key}` replaced. A value that is a single reference keeps the type of its target."""
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
