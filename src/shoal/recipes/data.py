"""The prompts and the judge of a recipe, where either comes as a Python object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.envs.datasets import DatasetSpec, read_train, to_messages
from shoal.envs.items import ItemEnvironment, judges_itself
from shoal.envs.user_code import load_object
from shoal.errors import ArgumentError
from shoal.recipes.config import Config
from shoal.recipes.translate import LABEL, is_path
from shoal.rewards.functions import RewardFunctions
from shoal.types import Task

RewardFn = Callable[..., Any] | str


def in_memory(config: Config, reward_fn: RewardFn | None) -> bool:
    return reward_fn is not None or not isinstance(config.dataset, str)


def environment_of(config: Config, reward_fn: RewardFn | None) -> ItemEnvironment:
    """Rows judged by `reward_fn`, or by themselves."""
    rows = read_rows(config)
    if reward_fn is None:
        if len(rows) and not judges_itself(rows[0]):
            raise ArgumentError("main: reward_fn: the rows have no get_reward(completion); give a reward function")
        return ItemEnvironment(rows, name=LABEL)
    function = load_object(reward_fn) if isinstance(reward_fn, str) else reward_fn
    return ItemEnvironment(rows, name=LABEL, rewards=RewardFunctions([function]))


def read_rows(config: Config) -> Sequence[Any]:
    """At most `max_rows` rows of the data set, wherever it lies. Each has a `prompt`."""
    data = config.dataset
    if not isinstance(data, str):
        return [data[index] for index in range(min(len(data), config.max_rows or len(data)))]
    path = data if is_path(data) else None
    spec = DatasetSpec(path, None if path else data, max_rows=config.max_rows)
    tasks = read_train(spec, ("prompt",), _task)
    return [{**task.data, "prompt": task.messages} for task in tasks]


def _task(row: Any) -> Task:
    return Task(to_messages(row["prompt"]), {key: value for key, value in row.items() if key != "prompt"})
