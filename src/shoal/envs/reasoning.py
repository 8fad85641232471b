"""`reasoning-gym:<task>`: any task of the reasoning-gym package, scored by its own `score_answer`.

A task stores only the index of its entry; the reward worker generates the entry again.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from shoal.core.errors import ConfigError
from shoal.core.types import Message, Task
from shoal.envs.base import EvalSize, Generated, TaskSeed, TrainSize, ask
from shoal.envs.countdown import TAG
from shoal.rewards.outcome import answer_of

SYSTEM_PROMPT = (
    "Solve the problem. Think first if you need to, then give only the answer inside <answer> and </answer> tags."
)
ENTRIES = 20_000  # the largest size that every task of the package accepts


class ReasoningGym(Generated):
    """Any task of the package reasoning-gym; further arguments are options of the task."""

    name = "reasoning-gym"
    max_reward = 1.0

    def __init__(
        self,
        task: str,
        num_train: TrainSize = 2000,
        num_eval: EvalSize = 200,
        seed: TaskSeed = 0,
        system_prompt: Annotated[str, Field(description="replaces the built-in system prompt")] = SYSTEM_PROMPT,
        **config: Any,
    ) -> None:
        self.name = f"reasoning-gym:{task}"
        self._entries = _create(task, seed, config)
        super().__init__(num_train, num_eval, seed)
        self._system_prompt = system_prompt

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        found = TAG.findall(answer_of(messages))
        answer = found[-1].strip() if found else None
        return float(self._entries.score_answer(answer, self._entries[task.data["entry"]]))

    def solution(self, task: Task) -> str | None:
        """The answer given by the package; None for the few tasks with many valid answers."""
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
