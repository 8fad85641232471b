"""The keys of the launcher, and how its arguments and its file become flat keys. Parses `allocation_mode`.

`KEYS` declares schema keys, defaults and conversions; a default of None is that of the schema. docs/launcher.md and
docs/coming-from/areal.md have it as a table. The grammar of `allocation_mode` is `backend[.|:]dims`, joined by `+`
(separate devices) or `|` (shared devices): `sglang.d1p1t1+d1p1t1` or `vllm:d2t1|fsdp:d2`. Dims are d (data), p
(pipeline), t (tensor), c (context) and e (expert) with their counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.config.fields import nearest
from shoal.config.load import COMMAND_LINE, read_config_text
from shoal.config.problems import is_secret, printable
from shoal.config.yaml_text import Source, parse_yaml
from shoal.core.errors import ConfigError
from shoal.runs.secrets import add_secret
from shoal.surfaces.names import Key

MODES_ON = ("auto", "on", "fault", "resume")
MODES_OFF = ("disabled", "off")


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _choose(yes: str, no: str) -> Callable[[Any], str]:
    return lambda value: yes if _flag(value) else no


def _workers(value: Any) -> int:
    """0 is valid for a data loader, but rewards need at least one worker process."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be a number of processes, 0 or more")
    return max(1, value)


def _switch(value: Any) -> bool:
    if value not in (*MODES_ON, *MODES_OFF):
        raise ValueError(f"must be one of {', '.join((*MODES_OFF, *MODES_ON))}")
    return value in MODES_ON


def _wandb(value: Any) -> list[str]:
    if value not in ("disabled", "online", "offline"):
        raise ValueError("must be disabled, online or offline")
    return [] if value == "disabled" else ["wandb"]


_SAVE = {"epochs": "train.save_epochs", "steps": "train.save_steps", "secs": "train.save_seconds"}
_EVAL = {"epochs": "orch.eval.interval_epochs", "steps": "orch.eval.interval", "secs": "orch.eval.interval_seconds"}

KEYS: dict[str, Key] = {
    "experiment_name": Key("train.output_dir", composed=True),
    "trial_name": Key("train.output_dir", default="trial0", composed=True),
    "seed": Key("train.seed"),
    "allocation_mode": Key(
        ("infer.engine", "train.gpus", "train.sharding"), default="embedded:d1|fsdp:d1", composed=True
    ),
    "total_train_epochs": Key("train.epochs", default=5, composed=True),
    "total_train_steps": Key("train.max_steps", composed=True),
    "tokenizer_path": Key("train.model", composed=True),
    "ref.path": Key("train.model", composed=True),
    "actor.path": Key("train.model"),
    "actor.lr": Key("train.learning_rate", default=1.70e-5),
    "actor.eps_clip": Key(("train.loss.clip_low", "train.loss.clip_high"), default=0.4),
    "actor.reward_scaling": Key("orch.reward.scale", default=10.0, composed=True),
    "actor.reward_bias": Key("orch.reward.bias"),
    "actor.kl_ctl": Key(("train.loss.kl.beta", "train.loss.kl.in"), default=0.0, composed=True),
    "actor.ppo_n_minibatches": Key("train.minibatches", default=1),
    "actor.recompute_logprob": Key("train.recompute_old", default=True, convert=_flag),
    "actor.use_decoupled_loss": Key("train.loss.type", default=True, convert=_choose("decoupled", "grpo")),
    "actor.behav_imp_weight_cap": Key("train.loss.cap", default=5.0, composed=True),
    "actor.group_reward_norm": Key("orch.advantage.mean", default=True, convert=_choose("group", "batch")),
    "actor.adv_norm": Key("orch.advantage.std", default="batch"),
    "actor.mb_spec.max_tokens_per_mb": Key("train.sequence_len", composed=True),
    "mb_spec.max_tokens_per_mb": Key("train.sequence_len", default=5120, composed=True),
    "gconfig.n_samples": Key("orch.rollouts_per_example", default=4),
    "gconfig.max_new_tokens": Key("orch.sampling.max_tokens", default=512),
    "gconfig.temperature": Key("orch.sampling.temperature", default=1.0),
    "train_dataset.path": Key(("orch.dataset.path", "orch.dataset.name"), default="openai/gsm8k", composed=True),
    "train_dataset.batch_size": Key("orch.batch_size", default=8, composed=True),
    "train_dataset.num_workers": Key("orch.reward.workers", convert=_workers),
    "rollout.max_concurrent_rollouts": Key("infer.max_num_seqs"),
    "rollout.max_head_offpolicyness": Key("orch.max_async_level", default=0),
    "rollout.engine_python": Key("infer.engine_python"),
    "rollout.base_url": Key("orch.client.base_url"),
    "rollout.port": Key("infer.port"),
    "saver.mode": Key(tuple(_SAVE.values()), default="auto", convert=_switch, composed=True),
    **{f"saver.freq_{unit}": Key(to, composed=True) for unit, to in _SAVE.items()},
    "recover.mode": Key("train.resume_from_checkpoint", default="disabled", convert=_switch),
    **{f"recover.freq_{unit}": Key(to, composed=True) for unit, to in _SAVE.items()},
    "evaluator.mode": Key("orch.eval", default="auto", convert=_switch, composed=True),
    **{f"evaluator.freq_{unit}": Key(to, composed=True) for unit, to in _EVAL.items()},
    "stats_logger.wandb.mode": Key("train.report_to", default="disabled", convert=_wandb),
    "stats_logger.wandb.wandb_api_key": Key("train.report_to", composed=True),
}


def table() -> str:
    """The table in docs/launcher.md."""

    def cell(value: object) -> str:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f"`{text}`".replace("|", "\\|")

    rows = ["| Key | Default | Sets |", "|---|---|---|"]
    for name, key in KEYS.items():
        default = "" if key.default is None else cell(key.default)
        rows.append(f"| `{name}` | {default} | {', '.join(map(cell, key.keys))} |")
    return "\n".join(rows)


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
