"""`arithmetic`: generated sums in five levels; the reward compares the last number of the answer exactly."""

from __future__ import annotations

import random
from collections.abc import Sequence

from shoal.envs.base import SingleTurn, answer_of, ask
from shoal.envs.generated import check_sizes, generated_tasks
from shoal.errors import ConfigError
from shoal.rewards.numeric import last_number, same_number
from shoal.types import Message, Task

# Per level: smallest operand, largest operand, how many operands.
LEVELS = {1: (0, 9, 2), 2: (10, 99, 2), 3: (100, 999, 2), 4: (10, 99, 3), 5: (10, 999, 4)}
OPERATIONS = "+-*"
# Eleven wordings were tried on SmolLM2-135M-Instruct (64 to 320 samples each, temperature 1): this one was right in
# 0.20 to 0.22, one more in 0.18 to 0.20, the plain question in 0.13. The two best differ by less than the noise.
PROMPT = "Compute {} and write only the result."


class Arithmetic(SingleTurn):
    name = "arithmetic"

    def __init__(
        self,
        level: int = 1,
        operations: str | Sequence[str] = "+",
        num_train: int = 5000,
        num_eval: int = 200,
        seed: int = 0,
    ) -> None:
        if level not in LEVELS:
            raise ConfigError(f"arithmetic: level is {level}; levels are 1 to 5")
        self._operations = sorted(set(operations))
        if not self._operations or any(op not in OPERATIONS for op in self._operations):
            raise ConfigError(f'arithmetic: operations is {operations!r}; choose from + - * (e.g. "+-")')
        check_sizes(num_train, num_eval)
        self._level = level
        self._sizes = {"train": num_train, "eval": num_eval}
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        return generated_tasks(self._draw, split=split, size=self._sizes.get(split, 0), seed=self._seed)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        number = last_number(answer_of(messages))
        return float(number is not None and same_number(number, str(task.data["answer"])))

    def solution(self, task: Task) -> str:
        return str(task.data["answer"])

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        low, high, count = LEVELS[self._level]
        operands = [rng.randint(low, high) for _ in range(count)]
        operators = [rng.choice(self._operations) for _ in range(count - 1)]
        if count == 2 and operators == ["-"]:
            operands.sort(reverse=True)  # the easy levels stay free of negative numbers
        text = " ".join(str(part) for pair in zip(operands, [*operators, ""], strict=True) for part in pair).strip()
        # a + b and b + a are the same question, so they fall into the same split.
        commutes = len(set(operators)) == 1 and operators[0] != "-"
        key = f"{operators[0]} {sorted(operands)}" if commutes else text
        return key, ask(PROMPT.format(text), answer=evaluate(operands, operators))


def evaluate(operands: Sequence[int], operators: Sequence[str]) -> int:
    """Value of `a op b op c …` with * before + and -."""
    total, term = 0, operands[0]
    for operator, operand in zip(operators, operands[1:], strict=True):
        if operator == "*":
            term *= operand
        else:
            total, term = total + term, operand if operator == "+" else -operand
    return total + term
