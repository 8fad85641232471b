"""An environment that a model with random weights can already play: write the digit 7."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.envs import SingleTurn, answer_of, ask
from shoal.types import Message, Task


class Sevens(SingleTurn):
    name = "sevens"

    def tasks(self, split: str) -> Sequence[Task]:
        start, size = (0, 1000) if split == "train" else (1000, 100)
        return [ask(f"Write sevens, please ({number}).") for number in range(start, start + size)]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        answer = answer_of(messages)
        return answer.count("7") / max(1, sum(character.isdigit() for character in answer))
