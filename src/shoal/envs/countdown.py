"""`countdown`: reach a target from given numbers with + - * /, each number used at most once."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from shoal.envs.base import SingleTurn, answer_of, ask
from shoal.envs.expressions import ExpressionError, calculate
from shoal.envs.generated import check_sizes, generated_tasks
from shoal.errors import ConfigError
from shoal.types import Message, Task

PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. You may use + - * / and brackets, and each "
    "number at most once. Give the expression inside <answer> and </answer> tags, for example "
    "<answer>(1 + 2) * 3</answer>."
)
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Countdown(SingleTurn):
    name = "countdown"

    def __init__(
        self,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 50,
        max_target: int = 100,
        format_reward: float = 0.1,
        num_train: int = 5000,
        num_eval: int = 200,
        seed: int = 0,
    ) -> None:
        if not 2 <= min_numbers <= max_numbers <= 8:
            raise ConfigError("countdown: needs 2 <= min_numbers <= max_numbers <= 8")
        if max_number < 2 * max_numbers or max_target < 10:
            raise ConfigError("countdown: max_number must be at least twice max_numbers, and max_target at least 10")
        if not 0 <= format_reward < 1:
            raise ConfigError(f"countdown: format_reward is {format_reward}; it must be at least 0 and below 1")
        check_sizes(num_train, num_eval)
        self._counts = (min_numbers, max_numbers)
        self._max_number = max_number
        self._max_target = max_target
        self._format_reward = format_reward
        self._sizes = {"train": num_train, "eval": num_eval}
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        return generated_tasks(self._draw, split=split, size=self._sizes.get(split, 0), seed=self._seed)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        """1 for reaching the target, `format_reward` for a well-formed try with the given numbers, else 0."""
        found = TAG.findall(answer_of(messages))
        if not found:
            return 0.0
        try:
            value, used = calculate(found[-1].split("=")[0])
        except ExpressionError:
            return 0.0
        if Counter(used) - Counter(task.data["numbers"]):
            return 0.0
        return 1.0 if value == Fraction(task.data["target"]) else self._format_reward

    def solution(self, task: Task) -> str:
        return f"<answer>{task.data['solution']}</answer>"

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        while True:
            numbers = rng.sample(range(1, self._max_number + 1), rng.randint(*self._counts))
            target, solution = _combine(rng, numbers)
            if 1 <= target <= self._max_target and target not in numbers:
                break
        key = f"{sorted(numbers)} {target}"
        prompt = PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
        return key, ask(prompt, numbers=numbers, target=target, solution=solution)


def _combine(rng: random.Random, numbers: Sequence[int]) -> tuple[int, str]:
    """Join all numbers by random operations, keeping every intermediate value a whole number."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (a, left), (b, right) = parts.pop(), parts.pop()
        operator = rng.choice("+-*/" if b and a % b == 0 else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operator]
        parts.append((value, f"({left} {operator} {right})"))
    value, text = parts[0]
    return value, text[1:-1]
