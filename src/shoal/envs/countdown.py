"""`countdown`: reach a target from given numbers with + - * /, each number used at most once.

`calculate` evaluates model-written arithmetic exactly, without Python's eval and with bounded length and depth.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from shoal.core.errors import ConfigError
from shoal.core.types import Message, Task
from shoal.envs.base import EvalSize, Generated, TaskSeed, TrainSize, ask
from shoal.rewards.outcome import answer_of

MAX_CHARS = 200
MAX_DEPTH = 20
_TOKEN = re.compile(r"\s*(\d{1,9}|[()+\-*/])")
_SAME = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


class ExpressionError(ValueError):
    """The text is not an expression, or divides by zero."""


def calculate(text: str) -> tuple[Fraction, list[int]]:
    """Return the value of an expression and the numbers it contains, in order."""
    parser = _Parser(_tokens(text))
    value = parser.sum(0)
    if parser.peek() is not None:
        raise ExpressionError(f"unexpected {parser.peek()!r}")
    return value, parser.numbers


def _tokens(text: str) -> list[str]:
    text = text.translate(_SAME).strip()
    if not text or len(text) > MAX_CHARS:
        raise ExpressionError("empty" if not text else f"longer than {MAX_CHARS} characters")
    tokens, position = [], 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ExpressionError(f"unexpected {text[position]!r}")
        tokens.append(found.group(1))
        position = found.end()
    return tokens


class _Parser:
    """Recursive descent: sum = term {+- term}, term = factor {*/ factor}, factor = [-] number | ( sum )."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self.numbers: list[int] = []

    def peek(self) -> str | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def take(self) -> str:
        token = self.peek()
        if token is None:
            raise ExpressionError("unexpected end")
        self._next += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.term(depth)
        while self.peek() in ("+", "-"):
            value = value + self.term(depth) if self.take() == "+" else value - self.term(depth)
        return value

    def term(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            operator, right = self.take(), self.factor(depth)
            if operator == "/" and right == 0:
                raise ExpressionError("division by zero")
            value = value * right if operator == "*" else value / right
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"brackets nested deeper than {MAX_DEPTH}")
        token = self.take()
        if token == "-":
            return -self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise ExpressionError("a bracket is not closed")
            return value
        if not token.isdigit():
            raise ExpressionError(f"unexpected {token!r}")
        self.numbers.append(int(token))
        return Fraction(int(token))


PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. You may use + - * / and brackets, and each "
    "number at most once. Give the expression inside <answer> and </answer> tags, for example "
    "<answer>(1 + 2) * 3</answer>."
)
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Countdown(Generated):
    """Reach a target from given numbers, each used at most once."""

    name = "countdown"
    max_reward = 1.0

    def __init__(
        self,
        min_numbers: Annotated[int, Field(ge=2, le=8, description="fewest numbers given")] = 3,
        max_numbers: Annotated[int, Field(ge=2, le=8, description="most numbers given")] = 4,
        max_number: Annotated[int, Field(ge=4, description="largest number given")] = 50,
        max_target: Annotated[int, Field(ge=10, description="largest target")] = 100,
        format_reward: Annotated[
            float, Field(ge=0, lt=1, description="reward of a well-formed expression that misses the target")
        ] = 0.1,
        num_train: TrainSize = 5000,
        num_eval: EvalSize = 200,
        seed: TaskSeed = 0,
    ) -> None:
        if min_numbers > max_numbers:
            raise ConfigError(f"countdown: min_numbers {min_numbers} is larger than max_numbers {max_numbers}")
        if max_number < 2 * max_numbers:
            raise ConfigError(f"countdown: max_number is {max_number}; it must be at least twice max_numbers")
        self._counts = (min_numbers, max_numbers)
        self._max_number = max_number
        self._max_target = max_target
        self._format_reward = format_reward
        super().__init__(num_train, num_eval, seed)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        """1 if the target is reached, `format_reward` for a valid expression that misses it, else 0."""
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
    """Combine all numbers with random operations. Every intermediate value is an integer."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (a, left), (b, right) = parts.pop(), parts.pop()
        operator = rng.choice("+-*/" if b and a % b == 0 else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operator]
        parts.append((value, f"({left} {operator} {right})"))
    value, text = parts[0]
    return value, text[1:-1]
