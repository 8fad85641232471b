"""Looks up keys in the schema: the keys of a section, the section at a path, the nearest match of an unknown key.

Used for error messages, overrides and the generated reference.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from shoal.config.yaml_text import KeyPath
from shoal.core.section import Section, Variant

Sections = tuple[type[Section], ...]  # the sections a key may hold: none, one, or variants selected by `type`


@dataclass(frozen=True)
class Key:
    path: tuple[str, ...]
    info: FieldInfo
    sections: Sections  # empty for a plain value
    many: bool = False  # a list of such sections

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def field_names(name: str, info: FieldInfo) -> list[str]:
    """The names of a field in a file. Shoal writes the first one."""
    if isinstance(info.validation_alias, AliasChoices):
        return [str(choice) for choice in info.validation_alias.choices]
    return [info.alias or name]


def fields_of(*sections: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a section, or of several variants: the fields of their base class first."""
    first = sections[0] if sections else None
    shared = (first.base(),) if len(sections) > 1 and first is not None and issubclass(first, Variant) else ()
    fields: dict[str, FieldInfo] = {}
    for section in (*shared, *sections):
        for name, info in section.model_fields.items():
            fields.setdefault(name, info)
    return fields


def known_keys(*sections: type[Section]) -> dict[str, FieldInfo]:
    return {key: info for name, info in fields_of(*sections).items() for key in field_names(name, info)}


def mark_of(info: FieldInfo, mark: str) -> Any:
    """What the declaration of a key says about itself in `json_schema_extra`; None without this mark.

    `binding`: a resumed run cannot change it. `grpo_only`: not for supervised training. `not_sft`: for GRPO and DPO.
    `split_only`: for the split layout. `remote_only`: not for the embedded engine in a co-located run. `server_only`:
    not for the embedded engine, with the reason. `started_only`: only for a server that Shoal starts. `lora_only`: no
    effect without LoRA.
    """
    return info.json_schema_extra.get(mark) if isinstance(info.json_schema_extra, dict) else None


def marked(section: type[Section], mark: str) -> dict[str, Any]:
    """The keys of `section` that have this mark, with its value."""
    return {name: value for name, info in section.model_fields.items() if (value := mark_of(info, mark)) is not None}


def variants_of(sections: Sections) -> tuple[type[Variant], ...]:
    """The variants, if `type` selects one of several."""
    variants = tuple(section for section in sections if issubclass(section, Variant))
    return variants if len(variants) > 1 else ()


def sections_of(annotation: Any) -> Sections:
    """The sections inside an annotation such as `Annotated[list[EnvConfig], …] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(dict.fromkeys(found for arg in get_args(annotation) for found in sections_of(arg)))


def sections_at(root: type[Section], path: KeyPath) -> Sections:
    """The sections whose keys are under `path`; empty for free-form data and plain values."""
    sections: Sections = (root,)
    for part in path:
        if isinstance(part, int):
            continue
        info = known_keys(*sections).get(part)
        if info is None:
            return ()
        sections = sections_of(info.annotation)
    return sections


def walk_keys(*sections: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key of the schema, in the order of declaration, each section before its keys."""
    for name, info in fields_of(*sections).items():
        path = (*prefix, field_names(name, info)[0])
        inner = sections_of(info.annotation)
        many = "list[" in str(info.annotation)
        yield Key(path, info, inner, many)
        yield from walk_keys(*inner, prefix=path)


# Names in other trainers → key.
ELSEWHERE = {
    "lr": "train.learning_rate",
    "epsilon": "train.loss.clip_low",
    "cliprange": "train.loss.clip_low",
    "clip_eps": "train.loss.clip_low",
    "beta": "train.loss.kl.beta",
    "kl_coef": "train.loss.kl.beta",
    "group_size": "orch.rollouts_per_example",
    "num_generations": "orch.rollouts_per_example",
    "n_samples": "orch.rollouts_per_example",
    "max_new_tokens": "orch.sampling.max_tokens",
    "max_completion_length": "orch.sampling.max_tokens",
    "backend": "infer.engine",
    "num_train_epochs": "train.epochs",
}


def nearest(word: str, known: list[str]) -> str | None:
    """The closest match. Prefers an anagram, since transposed letters are the most common typo."""
    found = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return next((near for near in found if sorted(near) == sorted(word)), found[0] if found else None)


ALIKE = 0.85


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def suggestion(root: type[Section], parent: KeyPath, key: str) -> str:
    """How to fix an unknown key: its name in Shoal, the same key in another section, a similar key, or all keys."""
    siblings = list(known_keys(*sections_at(root, parent)))
    elsewhere = [found.dotted for found in walk_keys(root) if found.path[-1] == key]
    elsewhere.sort(key=lambda dotted: dotted.count("."))
    near, far = nearest(key, siblings), nearest(key, [found.path[-1] for found in walk_keys(root)])
    if near is not None and far is not None and _similarity(key, far) > ALIKE > _similarity(key, near):
        near = None  # a key of another section is meant
    takes_arguments = {"id", "args"} <= set(siblings)  # of an environment: any name is possible
    renamed = _renamed(root, key)
    if renamed is not None and not elsewhere and not takes_arguments:
        return f"the key in Shoal is `{renamed}`"
    if near is not None and (not elsewhere or _similarity(key, near) > ALIKE):
        return f"did you mean `{near}`?"
    if takes_arguments:
        return f"put arguments under `args`: {{{key}: …}}"
    if elsewhere:
        return f"`{key}` belongs at `{elsewhere[0]}`"
    if far is not None:
        return f"did you mean `{next(k.dotted for k in walk_keys(root) if k.path[-1] == far)}`?"
    return f"known keys here: {', '.join(siblings)}" if siblings else "remove it"


def _renamed(root: type[Section], key: str) -> str | None:
    """The key in Shoal for a name of another trainer. For a single section, keys have no prefix."""
    ours = ELSEWHERE.get(key, "")
    return next((k.dotted for k in walk_keys(root) if f".{ours}".endswith(f".{k.dotted}")), None)


def given(section: Section, *names: str) -> list[str]:
    """The keys among `names` that have another value than their default.

    A key set to its default does not count, because the config.yaml of a run contains every key and can be run again.
    """
    fields = type(section).model_fields
    return [
        name
        for name in names
        if name in section.model_fields_set
        and getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]
