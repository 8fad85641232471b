"""GSM8K whose reward returns the worked solution as a hint after a wrong answer. Only the teacher sees it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.types import Message, Reward, Task
from shoal.envs.gsm8k import Gsm8k


class Hinted(Gsm8k):
    def reward(self, task: Task, messages: Sequence[Message]) -> Reward:  # type: ignore[override]
        total = super().reward(task, messages)
        return Reward(total=total, hint=None if total else f"This solution is correct:\n{self.solution(task)}")
