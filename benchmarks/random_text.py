"""Environments for random weights: rewards differ within a group from the first step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from shoal.core.types import Message, Task
from shoal.envs import SingleTurn, answer_of, ask

TALES = "Write a long story about {}, in plain words and with much detail, and do not come to an end soon. "
HEROES = (
    "a heron",
    "two otters",
    "an old lighthouse",
    "the tide",
    "a lost net",
    "a shoal of herring",
    "a quiet harbour",
)


class Sevens(SingleTurn):
    """Write the digit 7."""

    name = "sevens"

    def tasks(self, split: str) -> Sequence[Task]:
        start, size = (0, 1000) if split == "train" else (1000, 100)
        return [ask(f"Write sevens, please ({number}).") for number in range(start, start + size)]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        answer = answer_of(messages)
        return answer.count("7") / max(1, sum(character.isdigit() for character in answer))


class Evens(SingleTurn):
    """Write characters with an even code. Prompts have `characters` characters, so their number of tokens depends on
    the tokenizer.
    """

    name = "evens"

    def __init__(self, characters: int = 120) -> None:
        self.characters = characters

    def tasks(self, split: str) -> Sequence[Task]:
        start, size = (0, 1000) if split == "train" else (1000, 100)
        return [ask(self._prompt(number)) for number in range(start, start + size)]

    def _prompt(self, number: int) -> str:
        """The number comes first, so that no prompt is a prefix of another."""
        text = f"{number:04d}: {TALES.format(HEROES[number % len(HEROES)])}"
        return (text * (1 + self.characters // len(text)))[: self.characters]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        answer = answer_of(messages)
        return sum(ord(character) % 2 == 0 for character in answer) / max(1, len(answer))


USEFUL_SHARE = 0.4


class SomeUseful(Evens):
    """Only this share of the prompts has different rewards, for any model."""

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        useful = zlib.crc32(messages[0]["content"].encode()) / 2**32 < USEFUL_SHARE
        return super().reward(task, messages) if useful else 0.0
