"""Base classes for environments, and the episodes they hand out.

A subclass writes `tasks` and `reward`; a multi-turn one also `reply`. An episode is one attempt at one task and keeps
the whole conversation in `messages`. Nothing here scores: the reward pool calls `reward` in a worker process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from shoal.protocols import Episode
from shoal.types import Message, Task


def ask(prompt: str, *, system: str | None = None, **data: Any) -> Task:
    """A task of one user message; keyword arguments become its data, e.g. `ask("1 + 1?", answer=2)`."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return Task([*messages, {"role": "user", "content": prompt}], data)


def answer_of(messages: Sequence[Message]) -> str:
    """The text of the last assistant message, empty if there is none."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            return str(message.get("content") or "")
    return ""


class TaskList(Sequence[Task]):
    """Tasks made when they are asked for: a length and a function of the index."""

    def __init__(self, length: int, make: Callable[[int], Task]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._length))]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"task {index} of {self._length}")
        return self._make(position)


class OneAnswer:
    """An episode that is over after one answer."""

    def __init__(self, task: Task) -> None:
        self.messages: list[Message] = [dict(message) for message in task.messages]
        self._over = False

    async def reply(self, completion: str) -> list[Message] | None:
        if self._over:
            raise RuntimeError("this episode is over; an episode is used once")
        self._over = True
        self.messages.append({"role": "assistant", "content": completion})
        return None


class Dialogue:
    """An episode whose environment answers back, for at most `max_turns` answers of the policy."""

    def __init__(self, environment: MultiTurn, task: Task) -> None:
        self.messages: list[Message] = [dict(message) for message in task.messages]
        self._environment = environment
        self._task = task
        self._turns_left = environment.max_turns

    async def reply(self, completion: str) -> list[Message] | None:
        if self._turns_left <= 0:
            raise RuntimeError("this episode is over; an episode is used once")
        self._turns_left -= 1
        self.messages.append({"role": "assistant", "content": completion})
        # The last answer is not replied to: nobody would answer the reply.
        said = await self._environment.reply(self._task, self.messages) if self._turns_left else None
        if not said:
            self._turns_left = 0
            return None
        following: list[Message] = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        self.messages.extend(following)
        return following


class _Base:
    """What single- and multi-turn environments share."""

    name: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__dict__.get("name"):
            cls.name = cls.__name__

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of "train" or "eval", the same in every process."""
        raise NotImplementedError(f"{type(self).__name__} needs a method tasks(self, split)")

    def reward(self, task: Task, messages: Sequence[Message]) -> float | Mapping[str, float] | None:
        """Score a finished conversation: a number, named parts, or None to exclude the rollout. May be `async def`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method reward(self, task, messages)")

    def solution(self, task: Task) -> str | None:
        """An answer that earns the full reward, where one is known: used for warm starts and tests."""
        return None


def lacks_reward(environment: object) -> bool:
    """True if nobody wrote its `reward`: every call of it would fail."""
    return getattr(getattr(environment, "reward", None), "__func__", None) is _Base.reward


class SingleTurn(_Base):
    """One prompt, one answer, one reward."""

    def start(self, task: Task) -> Episode:
        return OneAnswer(task)


class MultiTurn(_Base):
    """The environment answers back through `reply` until it returns None or `max_turns` answers were given."""

    max_turns: int = 8

    async def reply(self, task: Task, messages: Sequence[Message]) -> str | list[Message] | None:
        """What follows the policy's last answer: user text, messages, or None to end. Keep state in `messages`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method reply(self, task, messages)")

    def start(self, task: Task) -> Episode:
        return Dialogue(self, task)
