"""Environments made of plain objects: items with `get_reward`, or rows scored by reward functions."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.core.errors import DataError
from shoal.core.types import Message, Task
from shoal.envs.base import SingleTurn
from shoal.envs.datasets import to_messages
from shoal.rewards.functions import RewardFunctions, RewardInput
from shoal.rewards.outcome import answer_of, call


class Items(Protocol):
    """A list, a tuple, a `datasets.Dataset`: anything with a length and an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class ItemError(DataError):
    """Invalid items: `what` is wrong with the items of `split`."""

    def __init__(self, environment: str, split: str, what: str) -> None:
        super().__init__(f"{environment}: {split} {what}")
        self.split, self.what = split, what


class ItemEnvironment(SingleTurn):
    """Each item has a `prompt` (text or messages). Its `get_reward(completion)` or the `rewards` score completions.

    An item is an object with attributes or a mapping of columns.
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
        self.keep_env = rewards.keep_env if rewards is not None else ()
        self.reward_group = self._reward_group if rewards is not None and rewards.takes_groups else None
        self._rewards = rewards
        self._items: dict[str, Items] = {"train": train, "eval": eval}
        if len(train) == 0:
            raise ItemError(name, "train", "is empty; provide at least one item")
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
        return self._rewards(_input(item, task, messages))

    def _reward_group(self, task: Task, group: Sequence[Sequence[Message]]) -> list[Any]:
        item = self._items[task.data["split"]][task.data["item"]]
        if judges_itself(item):
            return [self.reward(task, messages) for messages in group]
        assert self._rewards is not None
        return self._rewards.score_group([_input(item, task, messages) for messages in group])

    def _task(self, item: Any, split: str, index: int) -> Task:
        try:
            if judges_itself(item):
                _check_judge(item.get_reward)
            elif self._rewards is None:
                raise DataError(f"{type(item).__name__} has no method get_reward(completion)")
            else:
                self._rewards.check(list(columns_of(item)))
            messages = to_messages(_prompt(item))
        except DataError as error:
            raise ItemError(self.name, split, f"item {index}: {error}") from error
        return Task(messages, {"split": split, "item": index, **_digest(item)})


def _input(item: Any, task: Task, messages: Sequence[Message]) -> RewardInput:
    return RewardInput(item, columns_of(item), _prompt(item), answer_of(messages), task, messages)


def judges_itself(item: Any) -> bool:
    return callable(getattr(item, "get_reward", None))


def _check_judge(judge: Any) -> None:
    """Raise unless `get_reward` can be called with the completion as its only argument."""
    try:
        signature = inspect.signature(judge)
    except (TypeError, ValueError):  # a built-in without a signature
        return
    try:
        signature.bind("")
    except TypeError:
        takes = ", ".join(signature.parameters)
        raise DataError(f"get_reward({takes}) cannot be called as get_reward(completion)") from None


def columns_of(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    return {name: value for name, value in getattr(item, "__dict__", {}).items() if not name.startswith("_")}


def _prompt(item: Any) -> Any:
    prompt = item.get("prompt") if isinstance(item, Mapping) else getattr(item, "prompt", None)
    if prompt is None:
        columns = ", ".join(list(columns_of(item))[:12])
        raise DataError(f"{type(item).__name__} has no prompt" + (f"; it has {columns}" if columns else ""))
    return prompt


def _digest(item: Any) -> dict[str, str]:
    """Digest of a row's columns, so that a resumed run detects changed data. Empty for objects."""
    if not isinstance(item, Mapping):
        return {}
    try:
        text = json.dumps(columns_of(item), sort_keys=True)
    except (TypeError, ValueError):
        return {}
    return {"digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}
