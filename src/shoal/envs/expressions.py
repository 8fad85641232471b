"""A small exact calculator for model-written arithmetic: + - * / and brackets over whole numbers, nothing else.

Used by `countdown`. Never evaluates Python; bounded in length and depth, so no answer can make it slow.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 200
MAX_DEPTH = 20
_TOKEN = re.compile(r"\s*(\d{1,9}|[()+\-*/])")
_SAME = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


class ExpressionError(ValueError):
    """The text is not an expression, or divides by zero."""


def calculate(text: str) -> tuple[Fraction, list[int]]:
    """Value of an expression and the numbers written in it, in order."""
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
            raise ExpressionError("it ends too early")
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
            raise ExpressionError(f"brackets deeper than {MAX_DEPTH}")
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
