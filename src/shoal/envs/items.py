"""Environments out of plain objects: items with `get_reward`, or rows that reward functions judge."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.envs.base import SingleTurn, answer_of
from shoal.envs.datasets import to_messages
from shoal.errors import DataError
from shoal.rewards.functions import RewardFunctions, Scored
from shoal.rewards.outcome import call
from shoal.types import Message, Task


class Items(Protocol):
    """A list, a tuple, a `datasets.Dataset`: anything with a length and an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class ItemError(DataError):
    """Items that cannot be asked or judged: `what` is wrong with those of `split`."""

    def __init__(self, environment: str, split: str, what: str) -> None:
        super().__init__(f"{environment}: {split} {what}")
        self.split, self.what = split, what


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
            raise ItemError(name, "train", "is empty; give it at least one item")
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


def judges_itself(item: Any) -> bool:
    return callable(getattr(item, "get_reward", None))


def _check_judge(judge: Any) -> None:
    """It is called with the completion alone, which would fail for every rollout if it took another number."""
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
    """What a row knows besides its prompt, so that a resumed run notices other data. Objects are not looked into."""
    if not isinstance(item, Mapping):
        return {}
    try:
        text = json.dumps(columns_of(item), sort_keys=True)
    except (TypeError, ValueError):
        return {}
    return {"digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}
