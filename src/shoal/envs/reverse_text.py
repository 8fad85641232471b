"""`reverse-text`: write a text backwards. Texts are generated English phrases, or come from a dataset."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from shoal.envs.base import SingleTurn, answer_of, ask
from shoal.envs.datasets import DatasetSpec, read_splits
from shoal.envs.generated import check_sizes, generated_tasks
from shoal.envs.phrases import draw_phrase
from shoal.errors import ConfigError
from shoal.types import Message, Task

SYSTEM_PROMPT = (
    "Reverse the text you are given, character by character. "
    "Write the reversed text inside <reversed_text> and </reversed_text> tags."
)
TAG = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


class ReverseText(SingleTurn):
    name = "reverse-text"

    def __init__(
        self,
        min_len: int = 8,
        max_len: int = 40,
        num_train: int = 5000,
        num_eval: int = 200,
        seed: int = 0,
        system_prompt: str = SYSTEM_PROMPT,
        dataset: DatasetSpec | None = None,
    ) -> None:
        if not 2 <= min_len <= max_len:
            raise ConfigError(f"reverse-text: min_len {min_len} and max_len {max_len} need 2 <= min_len <= max_len")
        check_sizes(num_train, num_eval)
        self._bounds = (min_len, max_len)
        self._sizes = {"train": num_train, "eval": num_eval}
        self._seed = seed
        self._system_prompt = system_prompt
        self._dataset = dataset
        self._splits: dict[str, list[Task]] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        if self._dataset is None:
            size = self._sizes.get(split, 0)
            return generated_tasks(self._draw, split=split, size=size, seed=self._seed)
        if self._splits is None:
            self._splits = read_splits(self._dataset, ("prompt",), lambda row: self._task(str(row["prompt"]).strip()))
        return self._splits[split]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        found = TAG.search(answer_of(messages))
        response = found.group(1).strip() if found else ""
        return SequenceMatcher(None, response, task.data["answer"]).ratio()

    def solution(self, task: Task) -> str:
        return f"<reversed_text>{task.data['answer']}</reversed_text>"

    def _task(self, text: str) -> Task:
        return ask(text, system=self._system_prompt, answer=text[::-1])

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        text = draw_phrase(rng, *self._bounds)
        return text, self._task(text)
