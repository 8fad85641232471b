"""Environments out of plain objects: items with `get_reward`, or rows that reward functions judge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.envs.base import SingleTurn, answer_of
from shoal.envs.datasets import to_messages
from shoal.errors import ConfigError, DataError
from shoal.rewards.functions import RewardFunctions, Scored
from shoal.rewards.outcome import call
from shoal.types import Message, Task


class Items(Protocol):
    """A list, a tuple, a `datasets.Dataset`: anything with a length and an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class ItemEnvironment(SingleTurn):
    """Each item has `prompt` (text or messages) and judges completions itself, or `rewards` does it for all of them.

    An item is an object with attributes or a mapping of columns; `get_reward(completion) -> float | None` is its own.
    """

    name = "items"

    def __init__(
        self,
        train: Items,
        eval: Items = (),
        name: str = "items",
        rewards: RewardFunctions | None = None,
    ) -> None:
        self.name = name
        self.weights = rewards.weights if rewards is not None else {}
        self._rewards = rewards
        self._items: dict[str, Items] = {"train": train, "eval": eval}
        if len(train) == 0:
            raise DataError(f"{name}: there are no items to train on")
        self._tasks = {
            split: [self._task(items[index], split, index) for index in range(len(items))]
            for split, items in self._items.items()
        }

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    def reward(self, task: Task, messages: Sequence[Message]) -> Any:
        item = self._items[task.data["split"]][task.data["item"]]
        if judges_itself(item):
            return call(item.get_reward, answer_of(messages))
        assert self._rewards is not None
        return self._rewards(Scored(item, columns_of(item), _prompt(item), answer_of(messages)))

    def _task(self, item: Any, split: str, index: int) -> Task:
        what = f"{self.name}: {split} item {index}"
        if not judges_itself(item):
            if self._rewards is None:
                raise ConfigError(f"{what} ({type(item).__name__}) has no method get_reward(completion)")
            self._rewards.check(list(columns_of(item)))
        try:
            messages = to_messages(_prompt(item))
        except DataError as error:
            raise DataError(f"{what}: {error}") from error
        return Task(messages, {"split": split, "item": index, **_digest(item)})


def judges_itself(item: Any) -> bool:
    return callable(getattr(item, "get_reward", None))


def columns_of(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    return {name: value for name, value in getattr(item, "__dict__", {}).items() if not name.startswith("_")}


def _prompt(item: Any) -> Any:
    prompt = item.get("prompt") if isinstance(item, Mapping) else getattr(item, "prompt", None)
    if prompt is None:
        raise DataError(f"{type(item).__name__} has no prompt")
    return prompt


def _digest(item: Any) -> dict[str, str]:
    """What a row knows besides its prompt, so that a resumed run notices other data. Objects are not looked into."""
    if not isinstance(item, Mapping):
        return {}
    try:
        text = json.dumps(columns_of(item), sort_keys=True)
    except (TypeError, ValueError):
        return {}
    return {"digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}
