"""Base classes for environments, their episodes, and tasks generated from a seed.

A subclass implements `tasks` and `reward`; a multi-turn environment also implements `reply`. An episode is one attempt
at one task and holds the conversation in `messages`. The reward pool calls `reward` in a worker process.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, overload

from pydantic import Field

from shoal.core.errors import ConfigError
from shoal.core.protocols import Episode
from shoal.core.types import Message, Task


def ask(prompt: str, *, system: str | None = None, **data: Any) -> Task:
    """A task of one user message; keyword arguments become its data, e.g. `ask("1 + 1?", answer=2)`."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return Task([*messages, {"role": "user", "content": prompt}], data)


class TaskList(Sequence[Task]):
    """A lazy task list: its length and a function that makes the task at an index."""

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


def as_message(answer: Message | str) -> Message:
    """The message of an answer, which may be given as text."""
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else dict(answer)


class OneAnswer:
    """A single-turn episode: it ends after one answer."""

    def __init__(self, task: Task) -> None:
        self.messages: list[Message] = [dict(message) for message in task.messages]
        self._over = False

    async def reply(self, answer: Message | str) -> list[Message] | None:
        if self._over:
            raise RuntimeError("this episode has ended; start a new one")
        self._over = True
        self.messages.append(as_message(answer))
        return None


class Dialogue:
    """A multi-turn episode: the environment replies, for at most `max_turns` answers of the policy."""

    def __init__(self, environment: MultiTurn, task: Task) -> None:
        self.messages: list[Message] = [dict(message) for message in task.messages]
        self._environment = environment
        self._task = task
        self._turns_left = environment.max_turns

    async def reply(self, answer: Message | str) -> list[Message] | None:
        if self._turns_left <= 0:
            raise RuntimeError("this episode has ended; start a new one")
        self._turns_left -= 1
        self.messages.append(as_message(answer))
        # No reply to the last answer: the policy has no turn left to answer it.
        reply = await self._environment.reply(self._task, self.messages) if self._turns_left else None
        if not reply:
            self._turns_left = 0
            return None
        following: list[Message] = [{"role": "user", "content": reply}] if isinstance(reply, str) else list(reply)
        self.messages.extend(following)
        return following


class _Base:
    """Shared base of single- and multi-turn environments."""

    name: str = ""
    max_reward: float | None = None  # the highest possible reward; a group in which all have it is solved

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__dict__.get("name"):
            cls.name = cls.__name__

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of "train" or "eval". Every process must get the same tasks."""
        raise NotImplementedError(f"{type(self).__name__} needs a method tasks(self, split)")

    def reward(self, task: Task, messages: Sequence[Message]) -> float | Mapping[str, float] | None:
        """Score a finished conversation. Return a number, named parts, or None to exclude the rollout.

        May be `async def`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method reward(self, task, messages)")

    # A method reward_group(task, conversations) replaces `reward`: it returns one reward per rollout of a group.
    reward_group: Callable[[Task, Sequence[Sequence[Message]]], Sequence[Any]] | None = None

    def solution(self, task: Task) -> str | None:
        """Return an answer with full reward, None if unknown. Used for warm starts and tests."""
        return None


def lacks_reward(environment: object) -> bool:
    """True if the class implements neither `reward` nor `reward_group`, so that every call would fail."""
    if getattr(environment, "reward_group", None) is not None:
        return False
    return getattr(getattr(environment, "reward", None), "__func__", None) is _Base.reward


def wrong_reward_signature(environment: object) -> str | None:
    """The signature of `reward`, if it cannot be called with a task and messages."""
    reward = getattr(environment, "reward", None)
    if reward is None or getattr(environment, "reward_group", None) is not None:
        return None
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # unknown, as of functions written in C
        return None
    try:
        signature.bind(None, None)
    except TypeError:
        return str(signature)
    return None


class SingleTurn(_Base):
    """One prompt, one answer, one reward."""

    def start(self, task: Task) -> Episode:
        return OneAnswer(task)


class MultiTurn(_Base):
    """The environment replies through `reply` until it returns None or the policy has given `max_turns` answers."""

    max_turns: int = 8

    async def reply(self, task: Task, messages: Sequence[Message]) -> str | list[Message] | None:
        """Return the next user text or messages, or None to end the conversation. Keep state in `messages`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method reply(self, task, messages)")

    def start(self, task: Task) -> Episode:
        return Dialogue(self, task)


# Arguments that generated environments share.
TrainSize = Annotated[int, Field(ge=1, description="tasks in the train split")]
EvalSize = Annotated[int, Field(ge=1, description="tasks in the eval split")]
TaskSeed = Annotated[int, Field(description="which tasks are drawn")]

HELD_OUT_ONE_IN = 5
MAX_DRAWS = 10_000

Draw = Callable[[random.Random], tuple[str, Task]]


def held_out(key: str) -> bool:
    """True if tasks with this key belong to eval.

    The key identifies the question ("3+5" and "5+3" share one). The split does not depend on the seed, so runs with
    different seeds never train on each other's eval tasks.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"shoal-eval")
    return int.from_bytes(digest.digest(), "big") % HELD_OUT_ONE_IN == 0


def generated_tasks(draw: Draw, *, split: str, size: int, seed: int) -> TaskList:
    """Return `size` tasks of a split. `draw` returns (key, task) from a generator seeded by (seed, split, index)."""
    if split not in ("train", "eval"):
        raise ConfigError(f"unknown split {split!r}; generated environments have the splits train and eval")

    def make(index: int) -> Task:
        rng = random.Random(f"shoal/{seed}/{split}/{index}")
        for _ in range(MAX_DRAWS):
            key, task = draw(rng)
            if held_out(key) == (split == "eval"):
                return task
        raise ConfigError(f"too few different tasks for a separate {split} split; widen the environment's args")

    return TaskList(size, make)


class Generated(SingleTurn):
    """A single-turn environment that draws its tasks; a subclass defines `_draw`."""

    def __init__(self, num_train: int, num_eval: int, seed: int) -> None:
        self._sizes = {"train": num_train, "eval": num_eval}
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        return generated_tasks(self._draw, split=split, size=self._sizes.get(split, 0), seed=self._seed)

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        """Return a task, and the key that decides its split."""
        raise NotImplementedError
