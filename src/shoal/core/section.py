"""Base classes and field types of configuration sections. Sections are declared beside the code that uses them.

The core declares `train.loss`; `config` declares the other sections.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic.fields import FieldInfo

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
IN_MEMORY = "python-object"  # value of a key whose model or data a script passed as an object
USER_CODE = "module:function"  # how documentation and messages name a function written by the user
USER_CODE_PATTERN = r"^[A-Za-z0-9_./~-]+:[A-Za-z_][A-Za-z0-9_.]*$"


class Section(BaseModel):
    """Strict and frozen: unknown keys are errors, and `true` and `"40"` are not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Variant(Section):
    """One of several sections, selected by the key `type`. The first line of its docstring is its summary."""

    aliases: ClassVar[tuple[str, ...]] = ()
    type: str

    @classmethod
    def choice(cls) -> str:
        """The value of `type` that selects this class."""
        return cls.model_fields["type"].default

    @classmethod
    def summary(cls) -> str:
        return (cls.__doc__ or "").partition("\n")[0]

    @classmethod
    def parameters(cls) -> dict[str, FieldInfo]:
        """The keys that only this class has."""
        return {name: info for name, info in cls.model_fields.items() if name not in cls.base().model_fields}

    @classmethod
    def base(cls) -> builtins.type[Variant]:
        """The common base class of all alternatives: the direct subclass of Variant."""
        return cls.__mro__[cls.__mro__.index(Variant) - 1]

    @field_validator("type", mode="before")
    @classmethod
    def _resolve_alias(cls, value: Any) -> Any:
        return cls.choice() if isinstance(value, str) and value in cls.aliases else value


def one_of(members: Sequence[type[Variant]]) -> Any:
    """The annotation of a key that has one of `members`. Without `type`, the default of their base class is used."""
    default = members[0].base().choice()
    choices = {name: member.choice() for member in members for name in (member.choice(), *member.aliases)}

    def tag(value: Any) -> str:
        if isinstance(value, Variant):
            return value.choice()
        kind = value.get("type", default) if isinstance(value, dict) else default
        if isinstance(kind, str) and ":" in kind:
            kind = USER_CODE
        return choices.get(str(kind), str(kind))

    tagged = [Annotated[member, Tag(member.choice())] for member in members]
    return Annotated[Union[tuple(tagged)], Discriminator(tag), BeforeValidator(_without_nulls)]  # noqa: UP007


def _without_nulls(value: Any) -> Any:
    """Drop keys set to null: earlier versions wrote null for every parameter that was not set."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


NonEmpty = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
UserCode = Annotated[str, Field(pattern=USER_CODE_PATTERN)]
Strings = Annotated[list[NonEmpty], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
