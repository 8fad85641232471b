"""Rows into micro-batches: neighbours together, few of them, about equal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def micro_batches(sizes: Sequence[int], tokens: int | None, most: int | None) -> list[range]:
    """Which rows go together, at most `most` of them and at most `tokens` by their sizes; None = as many as there are.

    A row that is larger stands alone.
    """
    bound = sum(sizes)
    if tokens is not None:
        count = len(_filled(sizes, tokens, most))
        bound = bisect_left(range(tokens), True, key=lambda bound: len(_filled(sizes, bound, most)) <= count)
    return _filled(sizes, bound, most)


def smaller(parts: Sequence[Sequence[int]]) -> int | None:
    """A bound that halves the largest of the parts, given by the sizes of their rows; None where each is one row."""
    return max(map(sum, parts)) // 2 if max(map(len, parts)) > 1 else None


def _filled(sizes: Sequence[int], bound: int, most: int | None) -> list[range]:
    """Neighbours as long as they stay within the bound."""
    parts: list[range] = []
    filled = 0
    for at, size in enumerate(sizes):
        if parts and filled + size <= bound and (most is None or len(parts[-1]) < most):
            parts[-1], filled = range(parts[-1].start, at + 1), filled + size
        else:
            parts.append(range(at, at + 1))
            filled = size
    return parts
