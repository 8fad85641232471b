"""What a reward function returned, checked and turned into a number with named parts.

Used inside reward workers. A value that is not a usable reward raises `RewardValueError` with a sentence for the user;
it is never turned into 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_REWARD = 1e6
MAX_PARTS = 64


class RewardValueError(ValueError):
    """The reward function returned something that is not a reward."""


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a reward function; one declared `async def` is run to its end."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return asyncio.run(function(*args))
    return function(*args)


def read_outcome(value: Any, weights: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """(total, parts). Named parts are summed with their weights, 1 where none is given. None stays None."""
    if value is None:
        return None, {}
    if isinstance(value, Mapping):
        if not value or len(value) > MAX_PARTS:
            raise RewardValueError(f"the reward has {len(value)} parts; it needs 1 to {MAX_PARTS}")
        parts = {_part_name(name): checked_number(part, f"part {name!r}") for name, part in value.items()}
        total = sum(part * weights.get(name, 1.0) for name, part in parts.items())
        return checked_number(total, "the weighted sum"), parts
    return checked_number(value, "the reward"), {}


def _part_name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise RewardValueError(f"reward parts need short text names, not {str(name)[:64]!r}")
    return name


def checked_number(value: Any, what: str) -> float:
    """A finite number of a size that can be trained on, or RewardValueError."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise RewardValueError(f"{what} is a coroutine: declare the reward 'async def', or await inside it")
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise RewardValueError(f"{what} is {str(value)[:80]!r} of type {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardValueError(f"{what} is {number}, not a finite number")
    if abs(number) > MAX_REWARD:
        raise RewardValueError(f"{what} is {number:g}; rewards must lie within ±{MAX_REWARD:g}")
    return number
