"""The task of the ablations: reverse three or four random letters exactly.

The warm-up teaches both to copy the letters and to reverse them. GRPO then has to find out which of the two is
rewarded, which a tiny model learns in a few steps. The random letters of the warm-up give enough different prompts to
prevent memorising. GRPO has few prompts, so that each is sampled several times and prompt selection has an effect. The
reward is 1 or 0, so that zero-variance groups exist.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from shoal.core.types import Message, Task
from shoal.envs.base import ask
from shoal.envs.reverse_text import ReverseText

SHORTEST, LONGEST = 3, 4
REVERSED = 1 / 2  # share of the answers of the warm-up


class ExactReverse(ReverseText):
    """`reverse-text` on random letters, with the reward 1 for the exact answer and 0 otherwise."""

    name = "exact-reverse"

    def __init__(self, seed: int = 0, num_train: int = 160) -> None:
        super().__init__(SHORTEST, LONGEST, seed=seed, num_train=num_train)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(super().reward(task, messages) == 1.0)

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        text = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(SHORTEST, LONGEST)))
        return text, ask(text, answer=text[::-1])


def warm_up_answer(task: Task, rng: random.Random) -> str:
    """The answer of the warm-up: the reversed text, or a copy."""
    text = task.data["answer"] if rng.random() < REVERSED else task.data["answer"][::-1]
    return f"<reversed_text>{text}</reversed_text>"
