"""Looks things up in the schema: which keys a section has, which section stands at a path, where a key might belong.

Used for error messages, for the check of overrides and for the generated reference. Reads annotations only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from shoal.config.base import Section
from shoal.config.yaml_text import KeyPath


@dataclass(frozen=True)
class Key:
    path: tuple[str, ...]
    info: FieldInfo
    section: type[Section] | None  # what stands under the key, if it is a section itself
    many: bool = False  # a list of such sections

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def field_names(name: str, info: FieldInfo) -> list[str]:
    """What a field may be called in a file; the first is the one we write."""
    if isinstance(info.validation_alias, AliasChoices):
        return [str(choice) for choice in info.validation_alias.choices]
    return [info.alias or name]


def known_keys(section: type[Section]) -> dict[str, FieldInfo]:
    return {key: info for name, info in section.model_fields.items() for key in field_names(name, info)}


def section_of(annotation: Any) -> type[Section] | None:
    """The section inside an annotation such as `Annotated[list[EnvConfig], …] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for arg in get_args(annotation) if (found := section_of(arg)) is not None), None)


def section_at(root: type[Section], path: KeyPath) -> type[Section] | None:
    """The section whose keys stand under `path`; None if free-form data or a plain value stands there."""
    section: type[Section] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        info = known_keys(section).get(part) if section is not None else None
        if info is None:
            return None
        section = section_of(info.annotation)
    return section


def walk_keys(section: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key of the schema, sections before what is in them, in the order they are written."""
    for name, info in section.model_fields.items():
        path = (*prefix, field_names(name, info)[0])
        inner = section_of(info.annotation)
        many = "list[" in str(info.annotation)
        yield Key(path, info, inner, many)
        if inner is not None:
            yield from walk_keys(inner, path)


# What other trainers call it.
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
    """Of those that are alike one with the same letters: two of them are typed in the wrong order more often."""
    found = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return next((near for near in found if sorted(near) == sorted(word)), found[0] if found else None)


def suggestion(root: type[Section], parent: KeyPath, key: str) -> str:
    """How to fix an unknown key: what it is called here, the same word elsewhere, a similar word, or all there are."""
    here = section_at(root, parent)
    siblings = list(known_keys(here)) if here is not None else []
    elsewhere = [found.dotted for found in walk_keys(root) if found.path[-1] == key]
    near = nearest(key, siblings)
    takes_arguments = {"id", "args"} <= set(siblings)  # an environment's, which may be called like anything
    renamed = _renamed(root, key)
    if renamed is not None and not elsewhere and not takes_arguments:
        return f"it is called `{renamed}` here"
    if near is not None and (not elsewhere or difflib.SequenceMatcher(None, key, near).ratio() > 0.85):
        return f"did you mean `{near}`?"
    if takes_arguments:
        return f"arguments go under `args`: {{{key}: …}}"
    if elsewhere:
        return f"`{key}` belongs at `{elsewhere[0]}`"
    far = nearest(key, [found.path[-1] for found in walk_keys(root)])
    if far is not None:
        return f"did you mean `{next(k.dotted for k in walk_keys(root) if k.path[-1] == far)}`?"
    return f"known keys here: {', '.join(siblings)}" if siblings else "remove it"


def _renamed(root: type[Section], key: str) -> str | None:
    """Of a section alone the keys have no name before them."""
    ours = ELSEWHERE.get(key, "")
    return next((k.dotted for k in walk_keys(root) if f".{ours}".endswith(f".{k.dotted}")), None)
