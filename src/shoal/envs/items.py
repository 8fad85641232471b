"""Environments out of plain objects: items that carry a prompt and judge completions with `get_reward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.envs.base import SingleTurn, TaskList, answer_of
from shoal.envs.datasets import to_messages
from shoal.errors import ConfigError, DataError
from shoal.rewards.outcome import call
from shoal.types import Message, Task


class ItemEnvironment(SingleTurn):
    """Each item has `prompt` (text or messages) and `get_reward(completion) -> float | None`."""

    name = "items"

    def __init__(self, train: Sequence[Any], eval: Sequence[Any] = (), name: str = "items") -> None:
        self.name = name
        self._items: dict[str, Sequence[Any]] = {"train": train, "eval": eval}
        if len(train) == 0:
            raise DataError(f"{name}: there are no items to train on")
        for split, items in self._items.items():
            if len(items):
                self._check(items[0], f"{name}: {split} item 0")

    def tasks(self, split: str) -> Sequence[Task]:
        items = self._items.get(split, ())
        return TaskList(len(items), lambda index: _task(items[index], split, index))

    def reward(self, task: Task, messages: Sequence[Message]) -> Any:
        item = self._items[task.data["split"]][task.data["item"]]
        return call(item.get_reward, answer_of(messages))

    def _check(self, item: Any, what: str) -> None:
        if not callable(getattr(item, "get_reward", None)):
            raise ConfigError(f"{what} ({type(item).__name__}) has no method get_reward(completion)")
        _prompt(item)


def _prompt(item: Any) -> Any:
    prompt = item.get("prompt") if isinstance(item, Mapping) else getattr(item, "prompt", None)
    if prompt is None:
        raise DataError(f"{type(item).__name__} has no prompt")
    return prompt


def _task(item: Any, split: str, index: int) -> Task:
    return Task(to_messages(_prompt(item)), {"split": split, "item": index})
