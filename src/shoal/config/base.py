"""What every section of the schema shares: strict, frozen, no unknown key, and the small types used in several of them.

Imported by train.py, infer.py and orch.py. Never reads a file and never looks at another section.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
IN_MEMORY = "python-object"  # what a configuration says of a model or data that a script handed over as an object
USER_CODE_PATTERN = r"^[A-Za-z0-9_./~-]+:[A-Za-z_][A-Za-z0-9_.]*$"


class Section(BaseModel):
    """Strict: `true` is not a number and neither is `"40"`, so a slip is said instead of guessed at."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


def given(section: Section, *names: str) -> list[str]:
    """Which of these keys were set to something else than their default.

    A key written with its default value counts as not given, so that the resolved config.yaml of a run, where every
    key is written, can be run again.
    """
    fields = type(section).model_fields
    return [
        name
        for name in names
        if name in section.model_fields_set
        and getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


NonEmpty = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
UserCode = Annotated[str, Field(pattern=USER_CODE_PATTERN)]
Strings = Annotated[list[NonEmpty], BeforeValidator(_one_or_many)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
