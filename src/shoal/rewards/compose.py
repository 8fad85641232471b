"""Several named rewards as one: each is called, the pool sums them with their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.rewards.outcome import RewardValueError, call
from shoal.types import Message, Task

RewardFunction = Callable[[Task, Sequence[Message]], Any]


class NamedRewards:
    """`NamedRewards(correct=grade, short=(brevity, 0.2))`: call it as a reward, hand its `weights` to the environment.

    A part that returns None excludes the whole rollout: a sum without it would not be comparable within the group.
    """

    def __init__(self, **rewards: RewardFunction | tuple[RewardFunction, float]) -> None:
        if not rewards:
            raise ValueError("NamedRewards needs at least one reward")
        pairs = {name: reward if isinstance(reward, tuple) else (reward, 1.0) for name, reward in rewards.items()}
        self._functions = {name: function for name, (function, _) in pairs.items()}
        self.weights: Mapping[str, float] = {name: weight for name, (_, weight) in pairs.items()}

    def __call__(self, task: Task, messages: Sequence[Message]) -> dict[str, float] | None:
        parts: dict[str, float] = {}
        for name, function in self._functions.items():
            value = call(function, task, messages)
            if value is None:
                return None
            if isinstance(value, Mapping):
                raise RewardValueError(f"part {name!r} returned named parts itself; name each part once")
            parts[name] = value
        return parts
