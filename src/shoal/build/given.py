"""Python objects that a surface hands over where a configuration can only name things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.protocols import Environment


@dataclass(frozen=True)
class Given:
    """Whatever is set here is used instead of what the configuration names; the rest is built from it as ever."""

    environments: Mapping[str, Environment] = field(default_factory=dict)  # by label
    model: Any = None  # a transformers model; trained in place
    tokenizer: Any = None
    processes: int = 1  # that train together; a launcher started them
    local_rank: int = 0
