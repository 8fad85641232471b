"""`reasoning-gym:<task>`: any task of the reasoning-gym package, scored by its own `score_answer`.

Entries are drawn by index and drawn again where they are judged, so only an index travels with a task.
"""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from shoal.envs.base import SingleTurn, answer_of, ask
from shoal.envs.generated import check_sizes, generated_tasks
from shoal.errors import ConfigError
from shoal.types import Message, Task

SYSTEM_PROMPT = (
    "Solve the problem. Think first if you need to, then give only the answer inside <answer> and </answer> tags."
)
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ENTRIES = 20_000  # the most that every task of the package allows


class ReasoningGym(SingleTurn):
    name = "reasoning-gym"

    def __init__(
        self,
        task: str,
        num_train: int = 2000,
        num_eval: int = 200,
        seed: int = 0,
        system_prompt: str = SYSTEM_PROMPT,
        **config: Any,
    ) -> None:
        check_sizes(num_train, num_eval)
        self.name = f"reasoning-gym:{task}"
        self._entries = _create(task, seed, config)
        self._sizes = {"train": num_train, "eval": num_eval}
        self._seed = seed
        self._system_prompt = system_prompt

    def tasks(self, split: str) -> Sequence[Task]:
        return generated_tasks(self._draw, split=split, size=self._sizes.get(split, 0), seed=self._seed)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        found = TAG.findall(answer_of(messages))
        answer = found[-1].strip() if found else None
        return float(self._entries.score_answer(answer, self._entries[task.data["entry"]]))

    def solution(self, task: Task) -> str | None:
        """The package's own answer; a few tasks accept many and name none."""
        answer = self._entries[task.data["entry"]]["answer"]
        return None if answer is None else f"<answer>{answer}</answer>"

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        entry = rng.randrange(ENTRIES)
        question = self._entries[entry]["question"]
        return question, ask(question, system=self._system_prompt, entry=entry)


def _create(task: str, seed: int, config: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reasoning-gym:{task} needs the package reasoning-gym: pip install 'shoal[reasoning-gym]'"
        ) from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, list(DATASETS), n=1)
        hint = f"nearest is {near[0]!r}" if near else f"there are {len(DATASETS)}, e.g. chain_sum"
        raise ConfigError(f"reasoning-gym has no task {task!r}; {hint}")
    try:
        return create_dataset(task, seed=seed, size=ENTRIES, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym:{task}: {error} (args {json.dumps(config, default=str)})") from error
