"""Combine several named rewards into one. The pool computes their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.core.types import Message, Task
from shoal.rewards.functions import RewardFunctions, input_of
from shoal.rewards.outcome import RewardValueError

RewardFunction = Callable[..., Any]


class NamedRewards:
    """`NamedRewards(correct=grade, short=(brevity, 0.2))` is a reward; its `weights` belong to the environment.

    A part that returns None excludes the rollout: a sum without it would not be comparable within the group.
    """

    def __init__(self, **rewards: RewardFunction | tuple[RewardFunction, float]) -> None:
        if not rewards:
            raise ValueError("NamedRewards needs at least one reward")
        pairs = {name: reward if isinstance(reward, tuple) else (reward, 1.0) for name, reward in rewards.items()}
        self._functions = {
            name: RewardFunctions([function], label=f"NamedRewards: {name}") for name, (function, _) in pairs.items()
        }
        self.weights: Mapping[str, float] = {name: weight for name, (_, weight) in pairs.items()}

    def __call__(self, task: Task, messages: Sequence[Message]) -> dict[str, float] | None:
        parts: dict[str, float] = {}
        for name, function in self._functions.items():
            if function.takes_groups:
                raise RewardValueError(
                    f"part {name!r} compares the rollouts of a group; use reward_group = rewards.group"
                )
            value = function(input_of(task, messages))
            if value is None:
                return None
            parts[name] = _number(name, value)
        return parts

    def group(self, task: Task, conversations: Sequence[Sequence[Message]]) -> list[dict[str, float] | None]:
        """Score a group, if a part compares its rollouts: the `reward_group` of an environment."""
        inputs = [input_of(task, messages) for messages in conversations]
        columns = {name: function.score_group(inputs) for name, function in self._functions.items()}
        rows = [{name: values[at] for name, values in columns.items()} for at in range(len(inputs))]
        return [
            None if None in row.values() else {name: _number(name, value) for name, value in row.items()}
            for row in rows
        ]


def _number(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        raise RewardValueError(f"part {name!r} returned named parts; it must return a number")
    return value
